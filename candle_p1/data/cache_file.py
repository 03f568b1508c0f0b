"""The file that holds a cached table: its format, and whether it matches its source.

It contains, in this order: a magic word with the format's version; the digest of the header; the
header's length; the header, as JSON; padding; the numbers, float32, row by row; the codes of each
column of text, int32. The header says which file the cache was made from (path, size, modification
time and a digest of samples of its bytes) and how that file was read, and has a digest of every
slab of what follows. Thus a cache that is truncated, altered or made from another file is detected.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from candle_p1.data.source import Source
from candle_p1.data.table import CsvLayout, Table
from candle_p1.errors import CandleError

Bytes = Any  # NDArray[np.uint8], which typeshed does not accept as a buffer


MAGIC = b"CANDLEP1 cache 1"
FIXED = struct.Struct("<16s16sQ")
"""Magic word, digest of the header, length of the header in bytes."""
ALIGNMENT = 4096
SLAB_BYTES = 8 << 20
PARTIAL = ".partial"


class UnfitCacheError(CandleError):
    """A cache file that must not be used; the message says why, as a clause."""


class NoCacheError(UnfitCacheError):
    """There is no such file."""


Slab = tuple[int, int, str]
"""The first byte of a piece of the content, the byte after its last, and its digest."""


class Header(NamedTuple):
    """What a cache file says about itself.

    Attributes:
        source: What it was made from; see `describe_source`.
        shape: Rows and columns of the numbers.
        columns: The names of the columns of numbers.
        text: The distinct values of each column of text.
        slabs_xxh3: The digest of each slab.
    """

    source: dict[str, Any]
    shape: tuple[int, int]
    columns: list[str]
    text: dict[str, list[str]]
    slabs_xxh3: list[str]

    @property
    def part_bytes(self) -> list[int]:
        """The sizes of the numbers and of each column of text."""
        num_rows, num_columns = self.shape
        return [4 * num_rows * num_columns, *(4 * num_rows for _ in self.text)]

    def slabs(self) -> list[Slab]:
        """Returns the slabs, whose bytes are counted from the first one of the numbers."""
        bounds, first = [], 0
        for size in self.part_bytes:
            bounds += [(first + slab.start, first + slab.stop) for slab in _slabs(size)]
            first += size
        return [(*b, digest) for b, digest in zip(bounds, self.slabs_xxh3, strict=True)]

    def check(self) -> None:
        """Raises ValueError if the parts contradict each other, or a source is not described."""
        source_path, num_columns = self.source.get("path"), self.shape[1]
        if (
            min(self.shape) < 0
            or len(self.columns) not in (0, num_columns)
            or len(self.slabs()) != len(self.slabs_xxh3)
            or not isinstance(source_path, str)
            or "\0" in source_path
            or "layout" not in self.source
        ):
            raise ValueError


def describe_source(source: Source, layout: CsvLayout) -> dict[str, Any]:
    """Returns the description of a file that a cache of it must contain.

    Raises:
        DataError: The file cannot be read, or begins otherwise than the layout has it.
    """
    source.read_head(layout)  # a cache may be older than what is refused by now
    return {
        "path": str(source.path.resolve()),
        "bytes": source.num_bytes,
        "changed_ns": source.state[1],
        "samples_xxh3": source.digest(whole=False),
        "layout": json.loads(json.dumps(asdict(layout))),
    }


def write_cache(path: Path, table: Table, source: dict[str, Any], num_threads: int = 1) -> None:
    """Writes a table's cache atomically; only one process may do so at a time.

    Raises:
        OSError: It cannot be written; nothing is left behind.
    """
    parts = [_bytes_of(table.values), *(_bytes_of(each.codes) for each in table.text.values())]
    slabs = [part[bounds] for part in parts for bounds in _slabs(len(part))]
    with ThreadPoolExecutor(num_threads) as pool:
        digests = list(pool.map(xxhash.xxh3_64_hexdigest, slabs))
    num_rows, num_columns = table.values.shape
    text = {name: column.names for name, column in table.text.items()}
    content = Header(source, (num_rows, num_columns), table.columns, text, digests)
    header = json.dumps(content._asdict()).encode()
    fixed = FIXED.pack(MAGIC, xxhash.xxh3_128_digest(header), len(header))
    padding = b"\0" * (_first_byte(len(header)) - FIXED.size - len(header))
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            for block in (fixed, header, padding, *slabs):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_header(path: Path) -> tuple[Header, int]:
    """Returns the header, and where the numbers begin.

    Raises:
        UnfitCacheError: The header is missing or damaged, or the file does not have the right size.
    """
    from pydantic import TypeAdapter

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            raise UnfitCacheError("it is not a file")
        with path.open("rb") as file:
            fixed = file.read(FIXED.size)
            if len(fixed) < FIXED.size:
                raise UnfitCacheError("it is truncated")
            magic, digest, num_bytes = FIXED.unpack(fixed)
            if magic != MAGIC:
                raise UnfitCacheError("it is not a cache of this version")
            size = os.fstat(file.fileno()).st_size
            text = file.read(min(num_bytes, size))
            padding = file.read(_first_byte(len(text)) - FIXED.size - len(text))
    except FileNotFoundError as error:
        raise NoCacheError("there is none") from error
    except OSError as error:
        raise UnfitCacheError(f"it cannot be read: {error.strerror}") from error
    if xxhash.xxh3_128_digest(text) != digest or len(text) != num_bytes or any(padding):
        raise UnfitCacheError("its header is damaged")
    first_byte = _first_byte(num_bytes)
    try:
        header = TypeAdapter(Header).validate_json(text, strict=True)
        expected = first_byte + sum(header.part_bytes)
        if size != expected:
            raise UnfitCacheError(f"it has {size} bytes instead of {expected}")
        header.check()
    except ValueError as error:  # its digest is right, so another program has written it
        raise UnfitCacheError("its header does not describe a table") from error
    return header, first_byte


def check_header(path: Path, source: dict[str, Any]) -> tuple[Header, int]:
    """Returns the same as `read_header`, for a cache of this source.

    Raises:
        UnfitCacheError: As for `read_header`, or the cache was made from something else.
    """
    header, first_byte = read_header(path)
    different = [key for key in source if source[key] != header.source.get(key)]
    if different:
        reasons = {
            "bytes": "the size of its source has changed",
            "changed_ns": "its source has been modified since",
            "samples_xxh3": "the content of its source has changed",
        }
        raise UnfitCacheError(reasons.get(different[0], "it was made from something else"))
    return header, first_byte


def header_problem(path: Path, source: dict[str, Any]) -> str | None:
    """Returns why a cache's header does not match a source; None if it matches."""
    try:
        check_header(path, source)
    except UnfitCacheError as error:
        return str(error)
    return None


def _bytes_of(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _slabs(num_bytes: int) -> Sequence[slice]:
    starts = range(0, num_bytes, SLAB_BYTES)
    return [slice(start, min(start + SLAB_BYTES, num_bytes)) for start in starts]


def _first_byte(num_header_bytes: int) -> int:
    return -(-(FIXED.size + num_header_bytes) // ALIGNMENT) * ALIGNMENT
