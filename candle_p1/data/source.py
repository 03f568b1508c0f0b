"""A table's file: its bytes, its lines, and its first line, which tells the columns."""

from __future__ import annotations

import csv
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from candle_p1.distributed.comm import Attempt
from candle_p1.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from candle_p1.data.table import CsvLayout
    from candle_p1.distributed.comm import Communicator

HEAD_BYTES, BLOCK_BYTES = 1 << 16, 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Head(NamedTuple):
    """What the first line tells.

    Attributes:
        names: The columns' names; empty where there is no header.
        num_columns: The fields that a row must have.
        first_byte: Where the rows begin.
    """

    names: list[str]
    num_columns: int
    first_byte: int


def read_head(file: int, path: Path, layout: CsvLayout) -> tuple[Head, bytes]:
    """Reads an open file's first line; returns what it tells, and all that was read.

    Raises:
        DataError: The file is empty, or the header does not fit the layout.
        OSError: It cannot be read.
    """
    text = b""
    while b"\n" not in text.lstrip():
        block = os.pread(file, HEAD_BYTES, len(text))
        if not block:
            break
        text += block
    if not text:
        raise DataError("the file is empty", path)
    mark = len(BYTE_ORDER_MARK) if text.startswith(BYTE_ORDER_MARK) else 0
    content = text[mark:].lstrip(b"\r\n")
    line, *_ = content.partition(b"\n")
    if not line.strip():
        raise DataError("the file holds no rows", path)
    try:
        fields = next(csv.reader([line.decode()], delimiter=layout.separator))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"the first line cannot be read: {error}", path, 1) from error
    if not layout.header:
        return Head([], layout.num_columns or len(fields), mark), text
    for name in layout.text_columns:
        if name not in fields:
            raise DataError(f"the header names no column {name!r}", path, 1)
    if len(fields) != (layout.num_columns or len(fields)):
        raise DataError(f"{len(fields)} fields where {layout.num_columns} are expected", path, 1)
    return Head(fields, len(fields), len(text) - len(content) + len(line) + 1), text


@dataclass
class Source:
    """An open file.

    Attributes:
        path: Where it is.
        file: Its descriptor.
        num_bytes: Its size when it was opened.
        changed_ns: The time of its last change then.
        prefix: What has been read of its beginning already.
    """

    path: Path
    file: int
    num_bytes: int
    changed_ns: int
    prefix: bytes = b""

    def read_head(self, layout: CsvLayout) -> Head:
        """Returns what the first line tells; what was read for it is kept as prefix.

        Raises:
            DataError: It cannot be read, or does not fit the layout.
        """
        try:
            head, self.prefix = read_head(self.file, self.path, layout)
        except OSError as error:
            raise DataError(f"cannot read the file: {error.strerror}", self.path) from error
        return head

    def read(self, into: memoryview, start: int) -> None:
        """Fills memory with the bytes from a place on; several threads may.

        Raises:
            DataError: The file is shorter than it was.
            OSError: It cannot be read.
        """
        known = self.prefix[start : start + len(into)]
        into[: len(known)] = known
        done = len(known)
        while done < len(into):
            num = os.preadv(self.file, [into[done:]], start + done)
            if num == 0:
                raise self._changed()
            done += num

    def check(self) -> None:
        """Raises DataError if the file has been changed since it was opened."""
        status = os.fstat(self.file)
        if (status.st_size, status.st_mtime_ns) != (self.num_bytes, self.changed_ns):
            raise self._changed()

    def line_number(self, place: int) -> int:
        """Returns the number of the line, from 1, that a byte is in."""
        blocks = range(0, place, BLOCK_BYTES)
        sizes = (min(BLOCK_BYTES, place - start) for start in blocks)
        return 1 + sum(
            os.pread(self.file, size, start).count(b"\n")
            for start, size in zip(blocks, sizes, strict=True)
        )

    def is_cut(self, place: int) -> bool:
        """Returns whether the line at a place is the last one and lacks its end."""
        blocks = range(place, self.num_bytes, BLOCK_BYTES)
        return not any(b"\n" in os.pread(self.file, BLOCK_BYTES, start) for start in blocks)

    def _changed(self) -> DataError:
        return DataError("the file was changed while it was read", self.path)


@contextmanager
def open_together(path: Path, comm: Communicator) -> Iterator[Source]:
    """Opens a file on every rank; collective.

    Raises:
        DataError: It cannot be opened, or ranks see different sizes; the same on all ranks.
    """

    def open_file() -> Source:
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"cannot read the file: {error.strerror}", path) from error
        status = os.fstat(file)
        return Source(path, file, status.st_size, status.st_mtime_ns)

    source = Attempt(open_file).agree(comm)
    try:
        sizes = comm.allgather(source.num_bytes)
        if len(set(sizes)) > 1:
            raise DataError(
                f"the file has {min(sizes)} bytes on one rank and {max(sizes)} on another", path
            )
        yield source
    finally:
        os.close(source.file)
