"""Files in the kernel's page cache (warm), or made to be read from storage (cold)."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

from candle_p1.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

BLOCK_BYTES = 1 << 20
MAX_RESIDENT = 0.01
"""The share of a file that may be left in the cache of a file called cold."""


def warm(paths: Iterable[Path]) -> None:
    """Reads every file once."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK_BYTES):
                pass


def cool(paths: Iterable[Path]) -> None:
    """Drops every file from the page cache, and makes sure that it is gone.

    What the storage itself keeps in memory, a host's cache below a virtual machine for one, is out
    of reach.

    Raises:
        SetupError: The kernel keeps a file's pages, as of file systems that live in memory and of
            files that other processes have mapped; or does not tell.
    """
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a page that is yet to be written cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        resident = resident_share(path)
        if resident > MAX_RESIDENT:
            raise SetupError(
                f"{path}: {resident:.0%} of it cannot be dropped from the file cache, so there is"
                " no cold reading to measure: use a file of your own on a disk, or --file_cache"
                " warm"
            )


PREPARATIONS: dict[str, Callable[[Iterable[Path]], None]] = {"warm": warm, "cold": cool}


def resident_share(path: Path) -> float:
    """Returns the share of a file's pages that are in the page cache.

    The kernel tells it to those who may write to the file, and 1 to others.

    Raises:
        SetupError: There is no mincore() here.
    """
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        return 0.0
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except AttributeError as error:
        raise SetupError(f"this system does not tell what its file cache holds: {error}") from error
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    # A private mapping is writable, which ctypes wants for an address, and touches nothing.
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY) as mapped,
    ):
        first = ctypes.c_char.from_buffer(mapped)
        failed = mincore(ctypes.byref(first), ctypes.c_size_t(num_bytes), pages)
        del first  # a mapping with a pointer into it cannot be closed
    if failed:
        problem = os.strerror(ctypes.get_errno())
        raise SetupError(f"{path}: the file cache cannot be looked at: {problem}")
    return sum(page & 1 for page in pages) / len(pages)
