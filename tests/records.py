"""Records as a program in any language reads them: validated, then plain JSON."""

import json

from candle_p1.records import record
from candle_p1.records.record import read_per_rank

RUNNING = {
    "schema_version": 3,
    "status": "running",
    "benchmark": "nt3",
    "started": "2019-08-05T00:00:00.000+00:00",
    "num_ranks": 2,
    "parameters": {},
}
"""The record of a run that has begun."""


def read_record(path):
    """Returns a record's JSON; fails if the record is not valid."""
    record.read_record(path)
    return json.loads(path.read_text(encoding="utf-8"))


def per_rank(path, place):
    """Returns the raw values of all ranks at a place of a record, as a list."""
    return read_per_rank(path, record.read_record(path)).get(place).tolist()
