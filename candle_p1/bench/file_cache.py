"""Puts files into the kernel's page cache (warm), or removes them from it (cold)."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from candle_p1.errors import DataError, SetupError

BLOCK_BYTES = 1 << 20
MAX_RESIDENT = 0.01
"""The share of a cold file that may still be in the cache."""
STATES = ("warm", "cold")


def prepare_files(state: str, paths: Iterable[Path]) -> None:
    """Brings files into one of STATES.

    This does not reach caches of the storage itself, such as that of a virtual machine's host.

    Raises:
        DataError: A file cannot be read.
        SetupError: The kernel keeps a file's pages, because its file system is in memory or another
            process has mapped it; or the kernel cannot be asked.
    """
    for path in paths:
        try:
            _warm(path) if state == "warm" else _cool(path)
        except OSError as error:
            raise DataError(f"cannot read the file: {error.strerror}", path) from error


def _warm(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(BLOCK_BYTES):
            pass


def _cool(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # dirty pages cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    resident = resident_share(path)
    if resident > MAX_RESIDENT:
        raise SetupError(
            f"{path}: {resident:.0%} of it cannot be dropped from the file cache, so reading it"
            " cold cannot be measured: use a copy on a disk, or --file_cache warm"
        )


def resident_share(path: Path) -> float:
    """Returns the share of a file's pages that are in the page cache.

    If the user may not write to the file, the kernel answers 1.
    """
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        return 0.0
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    # ctypes takes addresses of writable mappings only; a private one leaves the file untouched.
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY) as mapped,
    ):
        first = ctypes.c_char.from_buffer(mapped)
        failed = mincore(ctypes.byref(first), ctypes.c_size_t(num_bytes), pages)
        del first  # otherwise the mapping cannot be closed
    if failed:
        problem = os.strerror(ctypes.get_errno())
        raise SetupError(f"{path}: the file cache cannot be inspected: {problem}")
    return sum(page & 1 for page in pages) / len(pages)
