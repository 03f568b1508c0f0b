"""Compressed text files: which formats there are, and what decompresses them as a stream."""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from candle_p1.errors import CandleError, DataError

MOST_BYTES = 1 << 40
"""A text that is longer is refused: address space is reserved for what it may contain."""


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
    """A format.

    Attributes:
        name: Its name, also that of the program which tests and decompresses such files.
        suffix: How the names of such files end.
        signature: How they begin.
        most_ratio: At most so many bytes of text are in one of theirs.
        open: Returns what reads the text, given what reads the file.
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
SIGNATURE_BYTES = 4


def compression_of(start: bytes) -> Compression | None:
    """Returns how a file is compressed that begins with these bytes; None if it is not."""
    return next((each for each in COMPRESSIONS if each.signature.match(start)), None)


class Decompressed(io.RawIOBase):
    """The text of a compressed file, from its beginning to the end of its last member or frame.

    Args:
        file: The file.
        compression: Its format.
        path: Where it is, for messages.

    Reading raises DataError if the file is damaged, or ends too early.
    """

    def __init__(self, file: IO[bytes], compression: Compression, path: Path) -> None:
        self._compression, self._path = compression, path
        try:
            self._text = compression.open(file)
        except ImportError as error:
            raise DataError(
                f"reading {compression.suffix} needs pyarrow: pip install 'candle-p1[readers]'",
                path,
            ) from error

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, into: Any) -> int:
        """Reads some bytes into memory; returns their number, which is 0 at the end."""
        try:
            return int(self._text.readinto(into))
        except (CandleError, MemoryError):
            raise
        except Exception as error:  # each library has its own errors
            name = self._compression.name
            raise DataError(
                f"the file is damaged or was copied incompletely: {name} cannot decompress it"
                f" ({error}); check it with {name} -t",
                self._path,
            ) from error
