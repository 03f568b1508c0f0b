"""Run records: one JSON file per run, from which every report is made.

Its type is candle_p1.records.types.RunRecord; candle_p1.records.schema generates the JSON Schema,
``schemas/run-record-3.json``, from it. A record is validated when it is made and when it is read.

The raw values of all ranks are in one compact file beside it, ``per_rank.npz``, of three arrays:

- ``names``: the paths of the statistics within the record, as JSON in UTF-8, for example
  ``["phases.load", "phases.broadcast.regions.wait.begin", …]``;
- ``ends``, int64: where the values of each path end;
- ``values``, float64: the concatenated values of all paths; NaN for a rank that has none.

A record is complete without this file; reports open it only where they need raw values.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from candle_p1.errors import RecordError
from candle_p1.files import (
    create_atomically,
    read_regular_bytes,
    release,
    reserve,
    write_atomically,
)
from candle_p1.records.rank_stats import RankStats, Section
from candle_p1.records.segments import completed, known_sections
from candle_p1.records.types import SCHEMA_VERSION, Failure, RunRecord
from candle_p1.text import count, printable

PER_RANK_NAME = "per_rank.npz"
MAX_FILE_BYTES, MAX_VALUE = 2**30, 1e100


PerRank = dict[str, NDArray[np.float64]]
"""One value per rank, by the path of its statistics within the record."""


def write_per_rank(record_path: Path, record: RunRecord) -> None:
    """Writes the raw values that the statistics of a record hold, if any, or raises OSError."""
    found = list(_walk("", record))
    if not found:
        return
    names, arrays = zip(*found, strict=True)
    content = io.BytesIO()
    np.savez(
        content,
        names=np.frombuffer(json.dumps(names).encode(), np.uint8),
        ends=np.cumsum([len(array) for array in arrays], dtype=np.int64),
        values=np.concatenate(arrays),
    )
    write_atomically(record_path.with_name(PER_RANK_NAME), content.getvalue())


def read_per_rank(record_path: Path, record: RunRecord) -> PerRank | None:
    """Returns the raw values beside a record; None if there are none.

    Raises RecordError if the file is damaged, or belongs to another run.
    """
    path = record_path.with_name(PER_RANK_NAME)
    if not path.exists():
        return None
    try:
        content = io.BytesIO(read_regular_bytes(path, MAX_FILE_BYTES))
        # Stored without compression, so that a damaged file is not larger in memory than on disk.
        if any(part.compress_type for part in zipfile.ZipFile(content).infolist()):
            raise ValueError("it is compressed")
        with np.load(content, allow_pickle=False) as arrays:
            names = json.loads(arrays["names"].tobytes())
            ends, values = arrays["ends"], arrays["values"]
        if (ends.dtype, values.dtype) != (np.int64, np.float64) or ends.shape != (len(names),):
            raise ValueError("its arrays do not have the right types and shapes")
        if np.any(np.diff(ends, prepend=0) < 0) or values.shape != (ends[-1],):
            raise ValueError("its arrays do not fit together")
        if not np.all(np.abs(values[~np.isnan(values)]) <= MAX_VALUE):
            raise ValueError("one of its values is not possible")
        found = dict(zip(names, np.split(values, ends[:-1]), strict=True))
        _check_belongs(found, record)
    except Exception as error:  # a damaged archive causes errors of many kinds
        raise RecordError(f"{path}: not the raw values of this run: {error}") from error
    return found


def _check_belongs(found: PerRank, record: RunRecord) -> None:
    for name, of_ranks in found.items():
        if name.startswith(("phases.", "training.")) and len(of_ranks) != record.num_ranks:
            raise ValueError(f"{name} does not have {count(record.num_ranks, 'value')}")
    for name, phase in (record.phases or {}).items():
        known = found[f"phases.{name}"]
        known = known[~np.isnan(known)]
        if not np.allclose([known.min(), known.max()], [phase.min_s, phase.max_s]):
            raise ValueError(f"the times of the phase {name} are not those of the record")


def _walk(place: str, item: object) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yields the paths and raw values of the statistics below an item of a record."""
    if isinstance(item, RankStats) and item.values is not None:
        yield place, item.values
    children: Iterable[tuple[object, object]] = ()
    if isinstance(item, Section):
        children = item
    elif isinstance(item, dict):
        children = item.items()
    elif isinstance(item, list):
        children = enumerate(item)
    for name, child in children:
        yield from _walk(f"{place}.{name}" if place else str(name), child)


RECORD_NAME = "run.json"
RESERVED_BYTES = 64 * 1024
"""Kept on the disk for the record of a run that fails, perhaps because the disk is full."""

MAX_RECORD_BYTES = 2**26
MAX_INTEGER, MAX_NUMBER, MAX_DIGITS = 2**63 - 1, 1e100, 100
"""The largest values of integers and of other numbers in a record that is read: nothing that is
measured is larger, and sums, products and ratios of such numbers are finite."""

AMOUNT = re.compile(
    r"(?!parameters\.|timeline\.|training\.epochs\.\d+\.metrics\.).*_(s|bytes|num|j|w|hz)"
)
"""Where a record has times, sizes, counts, energies and powers, which are never negative."""


def utc_now() -> str:
    """Returns the time of day in UTC as ISO 8601, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def finite(value: float) -> float | None:
    """Returns a number as a record holds it: infinity and NaN, which JSON lacks, become None."""
    return float(value) if math.isfinite(value) else None


def make_record(facts: Mapping[str, Any]) -> RunRecord:
    """Returns a record made of these sections, which are dictionaries or already typed.

    Raises:
        RecordError: They do not make a valid record; the message names the first wrong key.
    """
    try:
        return RunRecord.model_validate(dict(facts))
    except ValidationError as error:
        raise RecordError(f"record: {_explain(error)}") from error


def extend_record(record: RunRecord, **sections: Any) -> RunRecord:
    """Returns a record with sections added or replaced; its segments follow from them.

    Raises RecordError if the result is not valid.
    """
    return make_record(completed(known_sections(record) | sections))


def end_record(
    path: Path,
    status: str,
    failure: Failure | None = None,
    known: RunRecord | None = None,
    **measured: Any,
) -> RunRecord:
    """Ends a record file that still says "running", and leaves any other; returns it as it is then.

    A record that is known to be "running" is taken where the file is missing or damaged. Without
    measured sections, what the run has measured so far is taken.

    Raises:
        RecordError: The file is not a record, and none is known; or a section is not valid.
        OSError: It cannot be written.
    """
    try:
        record = read_record(path)
    except RecordError:
        if known is None:
            raise
        record = known
    if record.status != "running":
        return record
    how: dict[str, Any] = {"status": status, "ended": utc_now()}
    how |= {"failure": failure} if failure else {}
    ended = extend_record(record if measured else read_so_far(path), **how, **measured)
    try:
        write_record(path, ended)
    except OSError:  # on a full disk, there may be space for less
        if measured:
            raise
        ended = extend_record(record, **how)
        write_record(path, ended)
    return ended


def write_so_far(path: Path, record: RunRecord) -> None:
    """Writes what a run has measured so far to a file beside its record, for `read_so_far`.

    It is not the record, because another process may complete that at any time. Raises OSError.
    """
    text = json.dumps(record.model_dump(mode="json", exclude_unset=True), ensure_ascii=False)
    beside = _so_far(path).with_suffix(".new")  # not synced, which would take most of the time
    beside.write_bytes(text.encode(errors="replace"))
    beside.replace(_so_far(path))


def read_so_far(path: Path) -> RunRecord:
    """Reads a record; of a run that is "running", with what it has measured so far.

    Raises RecordError as `read_record`.
    """
    record = read_record(path)
    if record.status == "running":
        with suppress(RecordError):  # there is none, or a node was lost before it was on the disk
            return read_record(_so_far(path))
    return record


def continue_record(path: Path, record: RunRecord) -> None:
    """Replaces the record of a run that is continued, and keeps space as `begin_record` does.

    On an OSError, the old one is still there.
    """
    reserve(path, RESERVED_BYTES)
    write_atomically(path, _text_of(record))
    _remove_so_far(path)


def begin_record(path: Path, record: RunRecord) -> None:
    """Writes the record of a run that begins, and keeps space for the one that says how it ended.

    Raises FileExistsError if there is a record already, or another OSError.
    """
    create_atomically(path, _text_of(record))
    try:
        reserve(path, RESERVED_BYTES)
    except OSError:
        path.unlink()
        raise


def write_record(path: Path, record: RunRecord) -> None:
    """Writes the raw values that a record holds, then the record; atomically. Raises OSError."""
    write_per_rank(path, record)
    write_atomically(path, _text_of(record))
    _remove_so_far(path)
    release(path)


def read_record(path: Path) -> RunRecord:
    """Reads a record and validates it; removes what would control a terminal from its text.

    Raises:
        RecordError: The file is missing, is not JSON, has another schema version or is not valid.
    """
    try:
        text = read_regular_bytes(path, MAX_RECORD_BYTES).decode()
    except OSError as error:
        raise RecordError(f"{path}: cannot read the record: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: cannot read the record: it is not UTF-8 text") from error

    def parse_int(digits: str) -> int | float:  # Python would not read one of too many digits
        return int(digits) if len(digits) <= MAX_DIGITS else float(digits)

    try:
        content = _plausible(json.loads(text, parse_int=parse_int))
        text = json.dumps(content)
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise RecordError(f"{path}: not a record: it is nested too deeply") from error
    except ValueError as error:
        raise RecordError(f"{path}: not a record: {error!s:.200}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version is not None and version != SCHEMA_VERSION:
        raise RecordError(
            f"{path}: schema_version is {version!r:.40}, but this version reads {SCHEMA_VERSION}:"
            " repeat the run, or read the record with the version of candle-p1 that wrote it"
        )
    try:
        return RunRecord.model_validate_json(text)
    except ValidationError as error:
        raise RecordError(f"{path}: {_explain(error):.200}") from error


def _so_far(path: Path) -> Path:
    return path.with_name(f".{path.name}.so-far")


def _remove_so_far(path: Path) -> None:
    for each in (_so_far(path), _so_far(path).with_suffix(".new")):
        each.unlink(missing_ok=True)


def _plausible(value: Any, place: tuple[Any, ...] = ()) -> Any:
    """Returns a value from JSON with printable text.

    Its place is its key, after the place of what contains it: (((), "phases"), "load"). Raises
    ValueError if a number is none, or larger than anything that is measured, if a time or an amount
    is negative, or if text is not Unicode.
    """
    if isinstance(value, dict):
        return {
            _printable(key, place): _plausible(each, (place, key)) for key, each in value.items()
        }
    if isinstance(value, list):
        return [_plausible(each, (place, i)) for i, each in enumerate(value)]
    if isinstance(value, str):
        return _printable(value, place)
    if isinstance(value, (int, float)):
        largest = MAX_INTEGER if isinstance(value, int) else MAX_NUMBER
        if not -largest <= value <= largest:
            raise ValueError(f"{_named(place)} is {value:.6g}, which is not a possible value")
        if value < 0 and AMOUNT.fullmatch(_named(place)):
            raise ValueError(f"{_named(place)} is negative")
    return value


def _printable(text: str, place: tuple[Any, ...]) -> str:
    if text.isprintable():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{_named(place)} has text that is not Unicode") from error
    return printable(text)


def _named(place: tuple[Any, ...]) -> str:
    """Returns a place as "phases.load"."""
    keys: list[str] = []
    while place:
        place, key = place
        keys.append(str(key))
    return ".".join(reversed(keys))


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def _text_of(record: RunRecord) -> str:
    text = _to_json(record.model_dump(mode="json", exclude_unset=True), "") + "\n"
    return text.encode(errors="replace").decode()  # arguments and paths may not be Unicode


def _to_json(value: Any, indent: str) -> str:
    """Returns indented JSON with short objects and lists on one line, of 400 characters at most."""
    line = json.dumps(value, allow_nan=False, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or len(line) <= 400 - len(indent):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        items = [f"{_to_json(key, '')}: {_to_json(item, inner)}" for key, item in value.items()]
    else:
        items = [_to_json(item, inner) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{end}"
