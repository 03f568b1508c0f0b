"""Files of power readings: CSV, one line per reading."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np

from candle_p1.errors import DataError
from candle_p1.files import read_regular_bytes, write_atomically
from candle_p1.records.power_trace import Channel, Trace
from candle_p1.records.types import PowerDomain, PowerReading
from candle_p1.text import printable

OF_CHANNEL = ("device", "label", "domain", "source", "reading", "resolution_s")
COLUMNS = ("time_s", "node", *OF_CHANNEL, "value")
"""The value of an energy counter is in J, from an arbitrary origin; that of power is in W."""

MAX_FILE_BYTES, MAX_NUMBER = 2**30, 1e15


def write_traces(path: Path, traces: Iterable[Trace], node: int, start_s: float) -> None:
    """Writes the traces of a node; those without samples do not appear in the file.

    Times in the file are since `start_s`.

    Raises:
        OSError: The file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    of_channel = attrgetter(*OF_CHANNEL)
    for trace in traces:
        facts = node, *of_channel(trace.channel)  # csv writes None as nothing, and floats exactly
        times_s = (trace.times_s - start_s).tolist()
        writer.writerows(
            (time_s, *facts, value)
            for time_s, value in zip(times_s, trace.values.tolist(), strict=True)
        )
    write_atomically(path, text.getvalue())


def read_traces(path: Path) -> list[Trace]:
    """Reads the traces of one node.

    Raises:
        DataError: The file is missing, is not a file of power readings, or covers several nodes.
    """
    try:
        text = read_regular_bytes(path, MAX_FILE_BYTES).decode()
        reader = csv.DictReader(io.StringIO(text, newline=""))
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise DataError(
                f"is not a file of power readings: the columns must be {','.join(COLUMNS)}", path
            )
        rows = [(line, row) for line, row in enumerate(reader, start=2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"cannot be read: {reason}", path) from error
    if len({row["node"] for _, row in rows}) > 1:
        raise DataError("has readings of several nodes: split it into one file per node", path)
    samples: dict[Channel, tuple[list[float], list[float]]] = {}
    for line, row in rows:
        try:
            channel = _channel(row)
            time_s, value = float(row["time_s"]), float(row["value"])
            if not (abs(time_s) <= MAX_NUMBER and abs(value) <= MAX_NUMBER):
                raise ValueError("a number is not finite, or not possible")
        except (TypeError, ValueError) as error:
            raise DataError(str(error), path, line) from error
        times_s, values = samples.setdefault(channel, ([], []))
        if times_s and time_s <= times_s[-1]:
            raise DataError(f"{channel.device}: the times are not ascending", path, line)
        times_s.append(time_s)
        values.append(value)
    if not samples:
        raise DataError("has no readings", path)
    traces = []
    for channel, (times_s, values) in samples.items():
        interval_s = float(np.median(np.diff(times_s))) if len(times_s) > 1 else 0.0
        traces.append(Trace(channel, np.array(times_s), np.array(values), interval_s))
    return traces


def _channel(row: dict[str, str]) -> Channel:
    for name, known in (("domain", get_args(PowerDomain)), ("reading", get_args(PowerReading))):
        if row[name] not in known:
            raise ValueError(f"{name} {row[name]!r} is not one of {', '.join(known)}")
    resolution_s = float(row["resolution_s"]) if row["resolution_s"] else None
    if resolution_s is not None and not 0 <= resolution_s <= MAX_NUMBER:
        raise ValueError(f"resolution_s {row['resolution_s']} is not possible")
    names: Any = {name: printable(row[name]) for name in OF_CHANNEL[:-1]}
    return Channel(**names, resolution_s=resolution_s)
