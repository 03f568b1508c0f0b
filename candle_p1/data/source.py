"""The file of a table: its bytes, its lines, and its first line, which gives the columns.

What is not the table that is expected is refused with its remedy.
"""

from __future__ import annotations

import csv
import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from candle_p1.data.compression import (
    COMPRESSIONS,
    MOST_BYTES,
    SIGNATURE_BYTES,
    Compression,
    Decompressed,
    compression_of,
)
from candle_p1.data.table import CsvLayout, repeated
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.errors import DataError
from candle_p1.instrument.reading import ReadLog
from candle_p1.text import count

BLOCK_BYTES = 1 << 20
SCAN_BYTES = 1 << 18
"""How much is searched at a time: small enough to stay in the processor's cache."""
SAMPLE_BYTES, NUM_SAMPLES = 1 << 16, 16
BLANK_BYTES = 64
"""How many bytes of a line are looked at first to see whether it is blank."""
MAX_SHOWN_CHARS = 40
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

    Positions are those in the text, which in a compressed file are not those of the file's bytes.
    """

    names: list[str]
    num_columns: int
    first_byte: int
    num_blank: int

    def is_text(self, layout: CsvLayout) -> list[bool]:
        """Returns whether each column is text."""
        named = [name in layout.text_columns for name in self.names]
        return named + [False] * (self.num_columns - len(named))


@dataclass
class Source:
    """An open file.

    Attributes:
        path: Where it is.
        file: Its descriptor.
        num_bytes: Its size when it was opened.
        state: Its `file_state` then.
        compression: How its text is compressed; None if it is not.
    """

    path: Path
    file: int
    num_bytes: int
    state: tuple[int, int, int]
    compression: Compression | None = None

    @property
    def end(self) -> int:
        """Where the bytes that `read` returns end."""
        return self.num_bytes

    @property
    def most_text_bytes(self) -> int:
        """The length of its text, or what it cannot exceed if it is compressed."""
        ratio = self.compression.most_ratio if self.compression else 1
        return min(self.num_bytes * ratio, max(self.num_bytes, MOST_BYTES))

    @contextmanager
    def text(self, start: int = 0, log: ReadLog | None = None) -> Iterator[io.BufferedReader[Any]]:
        """Opens its text, from a position on; a log is told what is read of a compressed file.

        Reading it raises DataError if the file is damaged, or OSError if it cannot be read.
        """
        if self.compression is None:
            with open(self.file, "rb", closefd=False) as content:
                content.seek(start)
                yield content
            return
        file = io.BufferedReader(_Bytes(self, log or ReadLog()), BLOCK_BYTES)
        with io.BufferedReader(Decompressed(file, self.compression, self.path)) as content:
            while start > 0 and (skipped := content.read(min(start, BLOCK_BYTES))):
                start -= len(skipped)
            yield content

    def digest(self, *, whole: bool) -> str:
        """Returns the digest of all its bytes or of samples; raises DataError if unreadable."""
        size, last = SAMPLE_BYTES, max(self.num_bytes - SAMPLE_BYTES, 0)
        samples = [i * last // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)]
        digest = xxhash.xxh3_128()
        try:
            for place in range(0, self.num_bytes, size) if whole else samples:
                digest.update(os.pread(self.file, size, place))
        except OSError as error:
            raise unreadable(self.path, error) from error
        return digest.hexdigest()

    def read_head(self, layout: CsvLayout) -> Head:
        """Returns what the first line says that is not blank.

        Raises:
            DataError: The file is empty, its header does not match the layout, or it cannot be
                read.
        """
        path = self.path
        try:
            self._check_format(layout)
            start, number, line = self._first_line(layout.separator)
        except OSError as error:
            raise unreadable(path, error) from error
        problem = wrong_first_line(line.decode(errors="replace"), layout)
        if problem:
            raise DataError(problem, path, number)
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
        column, problem = wrong_header(fields, layout)
        if problem:
            raise DataError(problem, path, number, column)
        if len(fields) != (layout.num_columns or len(fields)):
            raise wrong_width(len(fields), layout.num_columns, path, number)
        return Head(fields, len(fields), start + len(line) + 1, number - 1)

    def check_suffix(self) -> None:
        """Raises DataError if the file is not compressed as its name says."""
        for each in COMPRESSIONS:
            if self.path.suffix.lower() == each.suffix and self.compression is not each:
                raise DataError(
                    f"the file is not compressed by {each.name}, but its name ends with"
                    f" {each.suffix}: rename it, or fetch it again",
                    self.path,
                )

    def _check_format(self, layout: CsvLayout) -> None:
        if not self.num_bytes:
            raise DataError("the file is empty", self.path)
        self.check_suffix()
        with self.text() as content:
            problem = wrong_format(content.read(LONGEST_SIGNATURE), layout)
        if problem:
            raise DataError(problem, self.path)

    def _first_line(self, separator: str) -> tuple[int, int, bytes]:
        """Returns where the first line that is not blank begins, its number, and its bytes."""
        start = 0
        with self.text() as content:
            for number, line in enumerate(content, start=1):
                mark = BYTE_ORDER_MARK if start == 0 and line.startswith(BYTE_ORDER_MARK) else b""
                text = line[len(mark) :]
                if not is_blank(text, separator):
                    return start + len(mark), number, text.removesuffix(b"\n")
                start += len(line)
        raise DataError("the file has no rows", self.path)

    def read(self, into: memoryview, start: int) -> None:
        """Fills memory with bytes of the file itself, from a position on, in any thread.

        Raises:
            DataError: The file has become shorter.
            OSError: It cannot be read.
        """
        if not fill(self.file, into, start):
            raise self._changed()

    def is_plain(self, head: Head, layout: CsvLayout, also: bytes = b"") -> bool:
        """Returns whether all libraries read the rows in the same way.

        They do not if there are quotes, NUL, a carriage return within a line, a separator at the
        end of the first row or of the file, blank lines at the beginning (one library then skips a
        byte order mark), or one of the bytes in `also`.
        """
        separator = layout.separator.encode()
        unusual = [bytes([byte]) for byte in b'"\0' + also]
        # Not mapped into memory: if the file became shorter, the process would be killed.
        with self.text(head.first_byte) as content:
            row = next((line for line in content if not is_blank(line, layout.separator)), b"")
        if row.rstrip(b"\r\n").endswith(separator) or head.num_blank:
            return False
        with_next = b""
        with self.text(head.first_byte) as content:
            for block in iter(partial(content.read, SCAN_BYTES), b""):
                if any(byte in block for byte in unusual):
                    return False
                with_next = block + content.read(1) if block.endswith(b"\r") else block
                if b"\r" in block:
                    at_end = with_next.endswith(b"\r")  # of the file
                    if with_next.count(b"\r") - at_end != with_next.count(b"\r\n"):
                        return False
        return not with_next.endswith(separator)

    def check(self) -> None:
        """Raises DataError if the file has changed, or its path leads to another, since opening."""
        try:
            now = [file_state(each) for each in (os.fstat(self.file), self.path.stat())]
        except OSError as error:
            raise self._changed() from error
        if now != [self.state] * 2:
            raise self._changed()

    def line_number(self, position: int) -> int:
        """Returns the number, from 1, of the line that contains the byte of text at a position."""
        with self.text() as content:
            sizes = (min(BLOCK_BYTES, position - at) for at in range(0, position, BLOCK_BYTES))
            return 1 + sum(content.read(size).count(b"\n") for size in sizes)

    def is_last_line_without_end(self, position: int) -> bool:
        """Returns whether no line of the text ends from a position on."""
        with self.text(position) as content:
            blocks = iter(partial(content.read, BLOCK_BYTES), b"")
            return not any(b"\n" in block for block in blocks)

    def stop(self) -> None:
        """Ends the reads that wait for something: none does."""

    def _changed(self) -> DataError:
        return DataError("the file was changed while it was read", self.path)


class _Bytes(io.RawIOBase):
    """The bytes of a file, in order; a log is told of every read."""

    def __init__(self, source: Source, log: ReadLog) -> None:
        self._source, self._log, self._start = source, log, 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        num_bytes = min(len(into), self._source.num_bytes - self._start)
        if num_bytes:
            try:
                with self._log.noted(num_bytes):
                    self._source.read(memoryview(into)[:num_bytes], self._start)
            except OSError as error:  # as those of the libraries that decompress
                raise unreadable(self._source.path, error) from error
        self._start += num_bytes
        return num_bytes


def is_blank(line: bytes | memoryview, separator: str) -> bool:
    """Returns whether a line, with or without its end, has only spaces and tabs."""
    blanks = b" \t".replace(separator.encode(), b"")
    if bytes(line[:BLANK_BYTES]).lstrip(blanks) not in (b"", b"\r", b"\n", b"\r\n"):
        return False  # nearly always, and without a copy of a long line
    content = bytes(line).removesuffix(b"\n").removesuffix(b"\r")
    return not content.strip(blanks)


def fill(file: int, into: memoryview, start: int) -> bool:
    """Fills memory with a file's bytes from a position on; returns whether it has so many.

    Raises:
        OSError: It cannot be read.
    """
    done = 0
    while done < len(into):
        num = os.preadv(file, [into[done:]], start + done)
        if num == 0:
            return False
        done += num
    return True


def unreadable(path: Path, error: OSError) -> DataError:
    """Returns the error for a file that cannot be read."""
    return DataError(f"the file cannot be read: {error.strerror}", path)


def wrong_width(num_fields: int, num_expected: int | None, path: Path, line: int) -> DataError:
    """Returns the error for a line that has too few or too many fields."""
    fields = count(num_fields, "field")
    return DataError(f"the line has {fields} instead of {num_expected}", path, line)


def wrong_line(
    num_fields: int,
    column: int,
    content: bytes,
    is_text: Sequence[bool],
    path: Path,
    line: int,
    label_column: int | None = None,
) -> DataError:
    """Returns the error for a line that the kernel has found wrong; see `_csvkernel.parse`."""
    if num_fields != len(is_text):
        return wrong_width(num_fields, len(is_text), path, line)
    what = "the label" if column == label_column else "the field"
    if not content.strip():
        return DataError(f"{what} is empty", path, line, column + 1)
    shown = content.decode("utf-8", "replace").rstrip("\n")
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "…"
    kind = "text" if is_text[column] else "a finite float32 number"
    return DataError(f"{what} {shown!r} is not {kind}", path, line, column + 1)


def file_state(status: os.stat_result) -> tuple[int, int, int]:
    """Returns a file's size, time of change in ns, and inode, which are the same on all nodes."""
    return status.st_size, status.st_mtime_ns, status.st_ino


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
        DataError: It is not a regular file, it cannot be opened, or ranks have opened different
            files; the same on all ranks.
    """

    def open_file() -> Source:
        check_regular(path)
        try:
            file = os.open(path, os.O_RDONLY)
            compression = compression_of(os.pread(file, SIGNATURE_BYTES, 0))
        except OSError as error:
            raise unreadable(path, error) from error
        status = os.fstat(file)
        return Source(path, file, status.st_size, file_state(status), compression)

    source = agree(comm, open_file)
    try:
        if comm.size > 1:
            _check_same(source, comm)
        yield source
    finally:
        os.close(source.file)


def _check_same(source: Source, comm: Communicator) -> None:
    """Raises DataError unless all ranks have opened one file, or equal copies of it; collective."""
    for whole in (False, True):
        digest = agree(comm, source.digest, whole=whole)
        different = comm.find_different((source.num_bytes, digest))
        if different:
            raise DataError(
                f"the file has other content on rank {different[0]} than on rank 0: give all nodes"
                " the same file, and do not replace it while it is read",
                source.path,
            )
        if not comm.find_different(source.state):  # otherwise, there are copies
            return


OpenSource = Callable[[Path, Communicator], AbstractContextManager[Source]]
"""What opens a file on every rank, as `open_together` does; collective."""


CONVERT = "convert it with pandas's to_csv"
ENCODE = "convert it with iconv -f UTF-16 -t UTF-8"
FORMATS = {
    b"\xfd7zXZ\0": ("compressed by xz", "decompress it with xz -d"),
    b"BZh": ("compressed by bzip2", "decompress it with bzip2 -d"),
    b"PK\x03\x04": ("an Excel workbook (xlsx) or another ZIP archive", f"unzip it, or {CONVERT}"),
    b"PAR1": ("a Parquet file", CONVERT),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", CONVERT),
    b"\xff\xfe": ("text in UTF-16", ENCODE),
    b"\xfe\xff": ("text in UTF-16", ENCODE),
}
"""What files are that begin with these bytes, and what to do about it."""
LONGEST_SIGNATURE = max(map(len, FORMATS))
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars", " ": "spaces"}


def wrong_format(start: bytes, layout: CsvLayout) -> str | None:
    """Returns what a file is that begins with these bytes; None if it may be a table."""
    found = [each for signature, each in FORMATS.items() if start.startswith(signature)]
    if b"\0" in start[:2]:
        found.append(("text in UTF-16 or not text", ENCODE))
    return f"the file is {found[0][0]}: {found[0][1]}; {expected(layout)}" if found else None


def wrong_first_line(line: str, layout: CsvLayout) -> str | None:
    """Returns what is wrong with a first line as a whole: its separator, or that it is a header."""
    own, wanted, line = layout.separator, {*layout.text_columns}, line.replace('"', "").strip()
    if layout.header:
        found = [s for s in (own, *SEPARATORS) if wanted <= {*line.split(s)}]
    else:  # a number has no semicolon
        found = [s for s in (";", "|", own, *SEPARATORS) if s in line]
    if found and found[0] != own:
        return (
            f"the fields are separated by {SEPARATORS[found[0]]}: write the file by"
            f" to_csv(sep={own!r}); {expected(layout)}"
        )
    fields = line.removeprefix(own).split(own)
    if not layout.header and len(fields) > 2 and fields == [str(i) for i in range(len(fields))]:
        return (
            "the line counts (0, 1, 2, …), as a header written by pandas does: write the file by"
            f" to_csv(header=False, index=False); {expected(layout)}"
        )
    return None


def wrong_header(fields: list[str], layout: CsvLayout) -> tuple[int | None, str | None]:
    """Returns what is wrong with a header, and in which column (from 1), if it is in one."""
    for name in layout.text_columns:
        if name not in fields:
            return None, f"the header has no column {name!r}; {expected(layout)}"
    for column, name in enumerate(fields, start=1):
        unnamed = not name.strip() or name.startswith("Unnamed: ")
        if unnamed and not layout.may_have_index:
            return column, (
                f"the column's name is {name!r}, as that of an index which pandas writes along:"
                " remove the column, or write the file by to_csv(index=False)"
            )
    for name in repeated(fields)[:1]:
        return None, f"the header has several columns {name!r}: remove or rename all but one"
    return None, None


def expected(layout: CsvLayout) -> str:
    """Returns what a file with a layout is, for messages."""
    header = "with a header" if layout.header else "without a header"
    if layout.text_columns:
        header += f" that has {' and '.join(layout.text_columns)}"
    elif layout.label_column == 0:
        header += ", the label first in each line"
    separator = SEPARATORS.get(layout.separator, repr(layout.separator))
    return f"expected: text in UTF-8 with fields separated by {separator}, {header}"
