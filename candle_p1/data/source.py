"""The file of a table: its bytes, its lines, and its first line, which gives the columns."""

from __future__ import annotations

import csv
import mmap
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from candle_p1.data.table import repeated
from candle_p1.distributed.comm import Attempt, Communicator
from candle_p1.errors import DataError
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from candle_p1.data.table import CsvLayout

HEAD_BYTES, BLOCK_BYTES = 1 << 16, 1 << 20
SCAN_BYTES = 1 << 18
"""How much is searched at a time: small enough to stay in the processor's cache."""
BLANK_BYTES = 64
"""How many bytes of a line are looked at first to see whether it is blank."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
"""What a path can lead to instead of a regular file."""


class Head(NamedTuple):
    """What the first line says.

    Attributes:
        names: The columns' names; empty if there is no header.
        num_columns: The number of fields that each row must have.
        first_byte: Where the rows begin.
        num_blank: The number of blank lines before the first line.
    """

    names: list[str]
    num_columns: int
    first_byte: int
    num_blank: int


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
        path = self.path
        try:
            start, line = self._first_line(layout.separator)
        except OSError as error:
            raise unreadable(path, error) from error
        if not self.prefix:
            raise DataError("the file is empty", path)
        if line is None:
            raise DataError("the file has no rows", path)
        number = 1 + self.prefix.count(b"\n", 0, start)
        if not layout.header and b'"' not in line:  # there may be millions of fields
            num_fields = line.count(layout.separator.encode()) + 1
            return Head([], layout.num_columns or num_fields, start, number - 1)
        content = line.removesuffix(b"\r")
        if b"\r" in content or b"\0" in content:
            raise DataError("the line has a carriage return or a NUL within it", path, number)
        try:
            fields = next(csv.reader([content.decode()], delimiter=layout.separator))
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"the line cannot be read: {error}", path, number) from error
        if not layout.header:
            return Head([], layout.num_columns or len(fields), start, number - 1)
        for name in layout.text_columns:
            if name not in fields:
                raise DataError(f"the header has no column {name!r}", path, number)
        for name in repeated(fields)[:1]:
            raise DataError(
                f"the header has several columns {name!r}: remove or rename all but one",
                path,
                number,
            )
        if len(fields) != (layout.num_columns or len(fields)):
            raise wrong_width(len(fields), layout.num_columns, path, number)
        return Head(fields, len(fields), start + len(line) + 1, number - 1)

    def _first_line(self, separator: str) -> tuple[int, bytes | None]:
        """Returns where the first line that is not blank begins, and its bytes; keeps the prefix.

        A line is blank if it has only spaces and tabs; None if all lines are.
        """
        text, start, searched = bytearray(), 0, 0
        while True:
            block = os.pread(self.file, max(HEAD_BYTES, len(text)), len(text))
            text += block
            if searched == 0 and text.startswith(BYTE_ORDER_MARK):
                start = len(BYTE_ORDER_MARK)
            while (end := text.find(b"\n", max(start, searched))) >= 0 or not block:
                line = bytes(memoryview(text)[start : end if end >= 0 else None])
                if not is_blank(line, separator):
                    self.prefix = bytes(text)
                    return start, line
                if end < 0:
                    self.prefix = bytes(text)
                    return start, None
                start = end + 1
            searched = len(text)

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

    def is_plain(self, head: Head, layout: CsvLayout, also: bytes = b"") -> bool:
        """Returns whether all libraries read the rows in the same way.

        They do not if there are quotes, NUL, a carriage return within a line, a separator at the
        end of the first row or of the file, blank lines at the beginning (one library then skips a
        byte order mark), or one of the bytes in `also`.
        """
        separator = layout.separator.encode()
        unusual = [bytes([byte]) for byte in b'"\0' + also]
        with mmap.mmap(self.file, self.num_bytes, access=mmap.ACCESS_READ) as content:
            first, line = head.first_byte, b""
            while first < self.num_bytes and is_blank(line, layout.separator):
                end = content.find(b"\n", first) + 1 or self.num_bytes
                first, line = end, content[first:end]
            ends = line.rstrip(b"\r\n").endswith(separator) or content[-1:] == separator
            if ends or head.num_blank:
                return False
            for start in range(head.first_byte, self.num_bytes, SCAN_BYTES):
                stop = start + SCAN_BYTES
                block = content[start : stop + 1]  # with what follows a last carriage return
                if any(byte in block for byte in unusual):
                    return False
                if b"\r" in block:
                    at_end = stop >= self.num_bytes and block.endswith(b"\r")
                    if block.count(b"\r", 0, SCAN_BYTES) - at_end != block.count(b"\r\n"):
                        return False
        return True

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


def is_blank(line: bytes | memoryview, separator: str) -> bool:
    """Returns whether a line, with or without its end, has only spaces and tabs."""
    blanks = b" \t".replace(separator.encode(), b"")
    if bytes(line[:BLANK_BYTES]).lstrip(blanks) not in (b"", b"\r", b"\n", b"\r\n"):
        return False  # nearly always, and without a copy of a long line
    content = bytes(line).removesuffix(b"\n").removesuffix(b"\r")
    return not content.strip(blanks)


def unreadable(path: Path, error: OSError) -> DataError:
    """Returns the error for a file that cannot be read."""
    return DataError(f"the file cannot be read: {error.strerror}", path)


def wrong_width(num_fields: int, num_expected: int | None, path: Path, line: int) -> DataError:
    """Returns the error for a line that has too few or too many fields."""
    fields = count(num_fields, "field")
    return DataError(f"the line has {fields} instead of {num_expected}", path, line)


def check_regular(path: Path) -> None:
    """Raises DataError if a file does not exist or is not a regular one, such as a pipe."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError as error:
        raise unreadable(path, error) from error
    if kind != stat.S_IFREG:
        raise DataError(
            f"it is {KINDS.get(kind, 'not a regular file')}: copy the data to a regular file", path
        )


@contextmanager
def open_together(path: Path, comm: Communicator) -> Iterator[Source]:
    """Opens a file on every rank; collective.

    Raises:
        DataError: It is not a regular file, it cannot be opened, or ranks see different sizes; the
            same on all ranks.
    """

    def open_file() -> Source:
        check_regular(path)
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(path, error) from error
        status = os.fstat(file)
        return Source(path, file, status.st_size, status.st_mtime_ns)

    source = Attempt(open_file).agree(comm)
    try:
        size = source.num_bytes
        largest, smallest = map(int, abs(comm.allreduce_max(np.array([size, -size]))))
        if smallest != largest:
            raise DataError(
                f"the file has {smallest} bytes on one rank and {largest} on another; give all"
                " nodes the same file",
                path,
            )
        yield source
    finally:
        os.close(source.file)


OpenSource = Callable[[Path, Communicator], AbstractContextManager[Source]]
"""What opens a file on every rank, as `open_together` does; collective."""
