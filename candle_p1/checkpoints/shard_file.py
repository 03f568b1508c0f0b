"""The copy of the state in memory, and writing it so that it survives a power failure."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from candle_p1.checkpoints.manifest import FileEntry

CHUNK_BYTES = 16 << 20
PAGE_BYTES = 4096


class WritingStoppedError(Exception):
    """Writing was given up."""


class CopyMemory:
    """Page-aligned memory, in whole pages, as writing past the page cache requires.

    `num_bytes` are used; `bytes`, and `buffer` for the operating system, have whole pages.

    Raises:
        OSError: There is not enough address space.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        size = max(-(-num_bytes // PAGE_BYTES), 1) * PAGE_BYTES
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # the kernel may have no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(mapping)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)

    def touch(self) -> None:
        """Has the kernel provide the memory, which takes longer than the copying."""
        self.bytes[::PAGE_BYTES] = 0


def write_synced(path: Path, memory: CopyMemory, stop: threading.Event | None = None) -> FileEntry:
    """Writes a new file and waits until it is on the disk.

    The page cache is avoided where the file system allows it: the content is then not copied once
    more, which saves memory and processor time that training needs. `stop` is set if writing is to
    be given up. Returns the file's size and digest, computed from the memory.

    Raises:
        OSError: It cannot be written; what was written is removed.
        WritingStoppedError: `stop` was set; likewise.
    """
    digest, content = xxhash.xxh3_128(), memory.buffer
    try:
        with _created(path) as file:
            for begin in range(0, memory.num_bytes, CHUNK_BYTES):
                if stop is not None and stop.is_set():
                    raise WritingStoppedError
                end = min(begin + CHUNK_BYTES, memory.num_bytes)
                digest.update(content[begin:end])
                _write(file, content[begin : -(-end // PAGE_BYTES) * PAGE_BYTES])
            os.ftruncate(file, memory.num_bytes)
            os.fsync(file)
    except FileExistsError:
        raise
    except BaseException as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # errors of a descriptor do not name the file
        raise
    return FileEntry(bytes=memory.num_bytes, xxh3_128=digest.hexdigest())


def file_entry(path: Path, *, uncached: bool = False) -> FileEntry:
    """Returns the size and the digest of a file, or raises OSError.

    With `uncached`, it is read from the disk and not from memory; it must be synced.
    """
    digest, size, chunk = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        if uncached:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while num_read := file.readinto(chunk):
            digest.update(chunk[:num_read])
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
def _created(path: Path) -> Iterator[int]:
    """Opens a new file past the page cache, or through it where the file system requires that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        with suppress(OSError):  # some kernels create the file before they refuse O_DIRECT
            path.unlink(missing_ok=True)
        file = os.open(path, flags, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, content: memoryview) -> None:
    """Writes whole pages at the end of a file; through the page cache where that is required."""
    while content:
        try:
            num_written = os.write(file, content)
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if num_written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        content = content[num_written:]
