"""Run records: one JSON file per run, from which every report is made.

``schemas/run-record-1.json`` is the schema; a record is checked against it when written and when
read. Every quantity names its unit in its key, and the raw values of all ranks are kept. A quantity
that was not measured is absent or says so; it is never 0.
"""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from candle_p1.errors import RecordError
from candle_p1.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SCHEMA_VERSION = 1
RECORD_NAME = "run.json"


def utc_now() -> str:
    """Returns the time of day in UTC as ISO 8601, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def finite(value: float) -> float | None:
    """Returns a number as a record holds it: JSON has no infinity and no NaN, which become None."""
    return float(value) if math.isfinite(value) else None


def over_ranks(per_rank: Sequence[float], unit: str) -> dict[str, Any]:
    """Returns min, mean, max and the raw values of a quantity measured on every rank."""
    return {
        f"min_{unit}": min(per_rank),
        f"mean_{unit}": sum(per_rank) / len(per_rank),
        f"max_{unit}": max(per_rank),
        f"per_rank_{unit}": list(per_rank),
    }


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Checks a record and writes it atomically.

    Raises:
        RecordError: The record does not fit the schema; nothing is written.
        OSError: The file cannot be written.
    """
    _check(record, str(path))
    write_atomically(path, json.dumps(record, indent=2, allow_nan=False) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """Reads a record and checks it.

    Raises:
        RecordError: The file is missing, is not JSON, or does not fit the schema.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot read the record: {error}") from error
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    _check(record, str(path))
    return record  # type: ignore[no-any-return]


def _check(record: object, where: str) -> None:
    from jsonschema.exceptions import best_match

    version = record.get("schema_version") if isinstance(record, dict) else None
    if version is not None and version != SCHEMA_VERSION:
        raise RecordError(
            f"{where}: schema_version {version!r} is not the {SCHEMA_VERSION} this version reads"
        )
    error = best_match(_validator().iter_errors(record))
    if error is not None:
        raise RecordError(f"{where}: {error.json_path}: {error.message}")


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    schema = files("candle_p1.records").joinpath(f"schemas/run-record-{SCHEMA_VERSION}.json")
    return Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
