"""The raw values behind a record's statistics, in one compact file beside it.

The file ``per_rank.npz`` holds three arrays:

- ``names``: the paths of the statistics within the record, as JSON in UTF-8, for example
  ``["phases.load", "phases.broadcast.regions.wait.begin", …]``;
- ``ends``, int64: where the values of each path end;
- ``values``, float64: the concatenated values of all paths; NaN for a rank that has none.

A record is complete without this file; reports open it only where they need raw values.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from candle_p1.errors import RecordError
from candle_p1.files import read_regular_bytes, write_atomically
from candle_p1.records.rank_stats import RankStats, Section
from candle_p1.records.types import RunRecord
from candle_p1.text import count

PER_RANK_NAME = "per_rank.npz"
MAX_FILE_BYTES, MAX_VALUE = 2**30, 1e100


PerRank = dict[str, NDArray[np.float64]]
"""One value per rank, by the path of its statistics within the record."""


def write_per_rank(record_path: Path, record: RunRecord) -> None:
    """Writes the raw values that the statistics of a record hold; nothing if they hold none.

    Raises:
        OSError: The file cannot be written.
    """
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

    Raises:
        RecordError: The file is damaged, or belongs to another run.
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
