"""The file of a table, compressed or not: its bytes, its text, and its first line.

`Loading` says how the tables of a run are read.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import xxhash

from candle_p1.data.directory import data_directory
from candle_p1.data.table import FORMATS, CsvLayout, check_first_line, check_format, check_header
from candle_p1.distributed.comm import Communicator, SerialCommunicator, agree
from candle_p1.errors import CandleError, DataError
from candle_p1.instrument.reading import ReadLog

BLOCK_BYTES = 1 << 20
SCAN_BYTES = 1 << 18
"""How much is searched at a time: small enough to stay in the processor's cache."""
SAMPLE_BYTES, NUM_SAMPLES = 1 << 16, 16
BLANK_BYTES = 64
"""How many bytes of a line are looked at first to see whether it is blank."""
MOST_BYTES = 1 << 40
"""A compressed text that is longer is refused: address space is reserved for what it may hold."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _open_gzip(file: IO[bytes]) -> Any:
    try:
        from isal import igzip  # three times as fast
    except ImportError:
        return gzip.GzipFile(fileobj=file)
    return igzip.IGzipFile(fileobj=file)


def _open_zstd(file: IO[bytes]) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")


class Compression(NamedTuple):
    """A format of compressed files: `name` is also that of the program which tests them.

    At most `most_ratio` bytes of text are in one byte of such a file, which begins with
    `signature`. `open` returns what reads the text, given what reads the file.
    """

    name: str
    suffix: str
    signature: re.Pattern[bytes]
    most_ratio: int
    open: Callable[[IO[bytes]], Any]


COMPRESSIONS = (
    # deflate needs at least a bit for the length, and one for the distance, of 258 bytes.
    Compression("gzip", ".gz", re.compile(rb"\x1f\x8b"), 1032, _open_gzip),
    # A block repeats a byte up to 2**17 times, and has 4 bytes. The second signature is that of a
    # frame without content, which programs that use several threads write first.
    Compression(
        "zstd",
        ".zst",
        re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
        1 << 15,
        _open_zstd,
    ),
)


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
        return [name in layout.text_columns for name in self.names] or [False] * self.num_columns


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
        with io.BufferedReader(_Text(self, self.compression, log or ReadLog())) as content:
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
        path, start, num_blank = self.path, 0, 0
        if not self.num_bytes:
            raise DataError("the file is empty", path)
        self.check_suffix()
        try:
            with self.text() as content:
                check_format(content.read(max(map(len, FORMATS))), layout, path)
            with self.text() as content:
                for whole in content:
                    line = whole if start else whole.removeprefix(BYTE_ORDER_MARK)
                    if not is_blank(line, layout.separator):
                        break
                    start += len(whole)
                    num_blank += 1
                else:
                    raise DataError("the file has no rows", path)
        except OSError as error:
            raise unreadable(path, error) from error
        start += len(whole) - len(line)
        line, number = line.removesuffix(b"\n"), num_blank + 1
        check_first_line(line.decode(errors="replace"), layout, path, number)
        fields: list[str] = []
        num_fields = line.count(layout.separator.encode()) + 1  # there may be millions
        if layout.header or b'"' in line:
            text = line.removesuffix(b"\r")
            if b"\r" in text or b"\0" in text:
                raise DataError("the line has a carriage return or a NUL within it", path, number)
            try:
                fields = next(csv.reader([text.decode()], delimiter=layout.separator))
            except (UnicodeDecodeError, csv.Error) as error:
                raise DataError(f"the line cannot be read: {error}", path, number) from error
            num_fields = len(fields)
        if not layout.header:
            return Head([], layout.num_columns or num_fields, start, num_blank)
        check_header(fields, layout, path, number)
        return Head(fields, num_fields, start + len(line) + 1, num_blank)

    def check_suffix(self) -> None:
        """Raises DataError if the file is not compressed as its name says."""
        for each in COMPRESSIONS:
            if self.path.suffix.lower() == each.suffix and self.compression is not each:
                raise DataError(
                    f"the file is not compressed by {each.name}, but its name ends with"
                    f" {each.suffix}: rename it, or fetch it again",
                    self.path,
                )

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

    def locate(self, position: int) -> tuple[int, bool]:
        """Returns the number, from 1, of the line at a byte of text, and whether it has no end."""
        with self.text() as content:
            sizes = (min(BLOCK_BYTES, position - at) for at in range(0, position, BLOCK_BYTES))
            number = 1 + sum(content.read(size).count(b"\n") for size in sizes)
            return number, not any(
                b"\n" in b for b in iter(partial(content.read, BLOCK_BYTES), b"")
            )

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


class _Text(io.RawIOBase):
    """The text of a compressed file, from its beginning to the end of its last member or frame."""

    def __init__(self, source: Source, compression: Compression, log: ReadLog) -> None:
        self._name, self._path = compression.name, source.path
        try:
            self._text = compression.open(io.BufferedReader(_Bytes(source, log), BLOCK_BYTES))
        except ImportError as error:
            raise DataError(
                f"reading {compression.suffix} needs pyarrow: pip install 'candle-p1[readers]'",
                source.path,
            ) from error

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        try:
            return int(self._text.readinto(into))
        except (CandleError, MemoryError):
            raise
        except Exception as error:  # each library has its own errors
            raise DataError(
                f"the file is damaged or was copied incompletely: {self._name} cannot decompress it"
                f" ({error}); check it with {self._name} -t",
                self._path,
            ) from error


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
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise DataError(
            f"it is {kinds.get(kind, 'a device')}: copy the data to a regular file", path
        )


@contextmanager
def open_together(path: Path, comm: Communicator, kind: type[Source] = Source) -> Iterator[Source]:
    """Opens a file on every rank, as a source of some kind; collective.

    Raises:
        DataError: It is not a regular file, it cannot be opened, or ranks have opened different
            files; the same on all ranks.
    """

    def open_file() -> Source:
        check_regular(path)
        try:
            file = os.open(path, os.O_RDONLY)
            start = os.pread(file, 4, 0)
        except OSError as error:
            raise unreadable(path, error) from error
        status, found = os.fstat(file), [c for c in COMPRESSIONS if c.signature.match(start)]
        compression = found[0] if found else None
        return kind(path, file, status.st_size, file_state(status), compression)

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


GIB = 2**30
TOGETHER = ("parallel", "cached")
"""The methods by which the ranks of a job read a table together."""


@dataclass(frozen=True)
class CacheSettings:
    """Where caches are.

    Attributes:
        directory: None means ``cache`` in the data directory.
        limit_bytes: The space that all caches together may take; the least recently used are
            removed first. 0 means no limit.
        stage_directory: A directory local to each node, to which a cache is copied once; None
            means that it is not copied.
        in_use: Those that this run has made or read, which it does not remove; on rank 0.
    """

    directory: Path | None = None
    limit_bytes: int = 0
    stage_directory: Path | None = None
    in_use: set[Path] = field(default_factory=set, compare=False)

    @property
    def path(self) -> Path:
        """The directory."""
        return self.directory or data_directory() / "cache"


@dataclass(frozen=True)
class Loading:
    """How tables are read.

    Attributes:
        method: A name in candle_p1.data.loaders.READERS.
        comm: The ranks that need the tables, on nodes whose ranks can share memory.
        num_threads: The number of threads of each rank.
        cache: Where `cached` keeps its files.
        notify: Called with messages for the user: on one rank of each node if its shared memory is
            too small, and on rank 0 if a cache is rebuilt or removed.
        progress: Called on rank 0 while a compressed file is read, with its name, how many of its
            bytes have been read, and its size.
        block_bytes: How much a thread reads at a time, with `parallel`; None: it depends on the
            file.
        source: What reads a file with `parallel`; another one is used for measurements.
        warnings: What the user should know about how the ranks share the tables.
    """

    method: str = "parallel"
    comm: Communicator = field(default_factory=SerialCommunicator)
    num_threads: int = 1
    cache: CacheSettings = field(default_factory=CacheSettings)
    notify: Callable[[str], None] | None = None
    progress: Callable[[str, int, int], None] | None = None
    block_bytes: int | None = None
    source: type[Source] = Source
    warnings: tuple[str, ...] = ()

    @property
    def num_copies(self) -> int:
        """The number of copies of a table that the job has: one for each node, or for each rank."""
        return self.comm.num_nodes if self.method in TOGETHER else self.comm.size
