"""The file of a table: its bytes, its lines, and its first line, which gives the columns."""

from __future__ import annotations

import csv
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from candle_p1.distributed.comm import Attempt
from candle_p1.errors import DataError
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from candle_p1.data.table import CsvLayout
    from candle_p1.distributed.comm import Communicator

HEAD_BYTES, BLOCK_BYTES = 1 << 16, 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Head(NamedTuple):
    """What the first line says.

    Attributes:
        names: The columns' names; empty if there is no header.
        num_columns: The number of fields that each row must have.
        first_byte: Where the rows begin.
    """

    names: list[str]
    num_columns: int
    first_byte: int


@dataclass
class Source:
    """An open file.

    Attributes:
        path: Where it is.
        file: Its descriptor.
        num_bytes: Its size when it was opened.
        changed_ns: Its modification time when it was opened.
        prefix: Its first bytes, as far as they have been read already.
    """

    path: Path
    file: int
    num_bytes: int
    changed_ns: int
    prefix: bytes = b""

    def read_head(self, layout: CsvLayout) -> Head:
        """Reads the first line, keeps the bytes read so far as prefix, and returns what it says.

        Raises:
            DataError: The file is empty, its header does not match the layout, or it cannot be
                read.
        """
        text, path = b"", self.path
        try:
            while b"\n" not in text.lstrip():
                block = os.pread(self.file, HEAD_BYTES, len(text))
                if not block:
                    break
                text += block
        except OSError as error:
            raise unreadable(path, error) from error
        if not text:
            raise DataError("the file is empty", path)
        mark = len(BYTE_ORDER_MARK) if text.startswith(BYTE_ORDER_MARK) else 0
        content = text[mark:].lstrip(b"\r\n")
        line, *_ = content.partition(b"\n")
        if not line.strip():
            raise DataError("the file has no rows", path)
        try:
            fields = next(csv.reader([line.decode()], delimiter=layout.separator))
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"the first line cannot be read: {error}", path, 1) from error
        self.prefix = text
        if not layout.header:
            return Head([], layout.num_columns or len(fields), mark)
        for name in layout.text_columns:
            if name not in fields:
                raise DataError(f"the header has no column {name!r}", path, 1)
        if len(fields) != (layout.num_columns or len(fields)):
            raise wrong_width(len(fields), layout.num_columns, path, 1)
        return Head(fields, len(fields), len(text) - len(content) + len(line) + 1)

    def read(self, into: memoryview, start: int) -> None:
        """Fills memory with the bytes from a position on; threads may call it concurrently.

        Raises:
            DataError: The file has become shorter.
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
        """Raises DataError if the file has changed since it was opened."""
        status = os.fstat(self.file)
        if (status.st_size, status.st_mtime_ns) != (self.num_bytes, self.changed_ns):
            raise self._changed()

    def line_number(self, position: int) -> int:
        """Returns the number, from 1, of the line that contains the byte at a position."""
        blocks = range(0, position, BLOCK_BYTES)
        return 1 + sum(
            os.pread(self.file, min(BLOCK_BYTES, position - start), start).count(b"\n")
            for start in blocks
        )

    def is_last_line_without_end(self, position: int) -> bool:
        """Returns whether no line ends from a position on."""
        blocks = range(position, self.num_bytes, BLOCK_BYTES)
        return not any(b"\n" in os.pread(self.file, BLOCK_BYTES, start) for start in blocks)

    def _changed(self) -> DataError:
        return DataError("the file was changed while it was read", self.path)


def unreadable(path: Path, error: OSError) -> DataError:
    """Returns the error for a file that cannot be read."""
    return DataError(f"the file cannot be read: {error.strerror}", path)


def wrong_width(num_fields: int, num_expected: int | None, path: Path, line: int) -> DataError:
    """Returns the error for a line that has too few or too many fields."""
    fields = count(num_fields, "field")
    return DataError(f"the line has {fields} instead of {num_expected}", path, line)


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
            raise unreadable(path, error) from error
        status = os.fstat(file)
        return Source(path, file, status.st_size, status.st_mtime_ns)

    source = Attempt(open_file).agree(comm)
    try:
        sizes = comm.allgather(source.num_bytes)
        if len(set(sizes)) > 1:
            raise DataError(
                f"the file has {min(sizes)} bytes on one rank and {max(sizes)} on another; give all"
                " nodes the same file",
                path,
            )
        yield source
    finally:
        os.close(source.file)
