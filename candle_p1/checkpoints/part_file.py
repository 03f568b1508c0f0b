"""Writing a file so that it survives a power failure, and reading its digest back."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import xxhash

from candle_p1.checkpoints.manifest import FileEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHUNK_BYTES = 16 << 20
PAGE_BYTES = 4096


class WritingStoppedError(Exception):
    """Writing was given up."""


def write_synced(
    path: Path, content: memoryview, num_bytes: int, ready: Callable[[int], bool] = lambda end: True
) -> FileEntry:
    """Writes a new file and waits until it is on the disk.

    The page cache is avoided where the file system allows it: the content is then not copied once
    more, which saves memory and processor time that training needs.

    Args:
        path: The file; there must be none.
        content: Memory that begins at a page and has whole pages.
        num_bytes: The size of the file.
        ready: Waits until the content is there up to the given byte; returns False if writing is to
            be given up. Called before each chunk.

    Returns:
        Its size and digest, computed from the memory.

    Raises:
        OSError: It cannot be written; what was written is removed.
        WritingStoppedError: `ready` returned False; likewise.
    """
    digest = xxhash.xxh3_128()
    try:
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            for begin in range(0, num_bytes, CHUNK_BYTES):
                end = min(begin + CHUNK_BYTES, num_bytes)
                if not ready(end):
                    raise WritingStoppedError
                digest.update(content[begin:end])
                _write(file, content, begin, end)
            os.ftruncate(file, num_bytes)
            os.fsync(file)
    except FileExistsError:
        raise
    except BaseException as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # errors of a descriptor do not name the file
        raise
    return FileEntry(bytes=num_bytes, xxh3_128=digest.hexdigest())


def file_entry(path: Path, *, uncached: bool = False) -> FileEntry:
    """Returns the size and the digest of a file.

    Args:
        path: The file.
        uncached: Read it from the disk, where the file system allows it, not from memory.

    Raises:
        OSError: It cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with (
        mmap.mmap(-1, CHUNK_BYTES) as buffer,
        memoryview(buffer) as memory,
        _opened(path, os.O_RDONLY, direct=uncached) as file,
    ):
        if uncached:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        while num_read := _retried(file, os.readv, [memory]):
            digest.update(memory[:num_read])
            size += num_read
    return FileEntry(bytes=size, xxh3_128=digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk.

    Raises:
        OSError: It cannot be opened, or the disk fails.
    """
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync directories
            raise
    finally:
        os.close(file)


@contextmanager
def _opened(path: Path, flags: int, direct: bool = True) -> Iterator[int]:
    try:
        file = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
        with suppress(OSError):  # some kernels create the file before they refuse O_DIRECT
            if flags & os.O_EXCL:
                path.unlink(missing_ok=True)
        file = os.open(path, flags, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, content: memoryview, begin: int, end: int) -> None:
    """Writes part of the content at the end of the file, and of the last page all."""
    end = -(-end // PAGE_BYTES) * PAGE_BYTES
    while begin < end:
        num_written = _retried(file, os.write, content[begin:end])
        if num_written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        begin += num_written


def _retried(file: int, call: Callable[[int, Any], int], data: Any) -> int:
    """Reads or writes; a second time through the page cache where the file system requires that."""
    try:
        return call(file, data)
    except OSError as error:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return call(file, data)
