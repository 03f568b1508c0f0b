"""Memory in huge pages: private, or that of a file which several processes map.

Linux gives files in ``/dev/shm`` small pages unless the administrator allows others: a store then
costs a page fault for every 4 KiB, and those who write through the file wait for each other. On
request, it joins the pages of a part of a file into huge ones, whatever that setting is
(``MADV_COLLAPSE``, since Linux 6.1). Where it does not, callers write through the file.

The host of a virtual machine can have taken back its free memory, in large pieces. A huge page
then costs hundreds of exchanges with the host, while small pages come from fragments that it has
left. So no more huge pages are asked for once one has taken SLOW_S.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

HUGE_BYTES = 2 << 20
"""The size of a huge page. Others, which some processors have, are too large for small tables."""
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MAP_FIXED, MADV_COLLAPSE = 0x10, 25  # which Python's mmap does not have
MAP_NORESERVE = 0x4000  # which that of Python 3.10 does not have
NUM_TRIES = 3
SLOW_S = 1e-3
"""About what the same memory costs in small pages, and ten times what filling it with 0 takes."""
PASSING = (errno.EAGAIN, errno.EBUSY)
"""What is reported if another process uses the pages at the moment."""


@cache
def are_available() -> bool:
    """Returns whether the kernel has huge pages of HUGE_BYTES and is allowed to use them."""
    try:
        size = int((SETTINGS / "hpage_pmd_size").read_text())
        return size == HUGE_BYTES and "[never]" not in (SETTINGS / "enabled").read_text()
    except (OSError, ValueError):
        return False


def small_pages(num_bytes: int) -> mmap.mmap:
    """Returns private memory for which no huge pages are asked, as NumPy would for large arrays."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.mmap.restype = address
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    return libc


def _map(address: int | None, num_bytes: int, access: int, flags: int, file: int) -> int:
    mapped = _libc().mmap(address, num_bytes, access, flags, file, 0)
    if mapped == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(mapped)


class HugeFile:
    """A file that is mapped where huge pages fit.

    Args:
        file: A descriptor, which the caller keeps open while `fill` is called.
        num_bytes: Its size, a multiple of HUGE_BYTES.
        in_memory: Whether it is on a file system in memory.

    Attributes:
        memory: The mapped memory, which is unmapped when nothing refers to it any more.

    Raises:
        OSError: There is no address space.
    """

    def __init__(self, file: int, num_bytes: int, *, in_memory: bool) -> None:
        self._file, self._works = file, in_memory and are_available()
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        room = num_bytes + HUGE_BYTES
        # To have the address chosen, as addresses of files need not be multiples of huge pages.
        reserved = _map(None, room, 0, private, -1)
        self._address = -(-reserved // HUGE_BYTES) * HUGE_BYTES
        access = mmap.PROT_READ | mmap.PROT_WRITE
        _map(self._address, num_bytes, access, mmap.MAP_SHARED | MAP_FIXED, file)
        self.memory = (ctypes.c_char * num_bytes).from_address(self._address)
        # Not at the end of the process, when arrays may still be in use.
        weakref.finalize(self.memory, _libc().munmap, reserved, room).atexit = False

    def fill(self, first: int, last: int) -> bool:
        """Has the bytes from `first` to before `last` in huge pages, so that stores cannot fail.

        What other processes have written stays. Returns False if the kernel cannot do it, or was
        slow with one of them or before.

        Raises:
            OSError: There is no room for them.
        """
        if not self._works:
            return False
        pages = range(first // HUGE_BYTES * HUGE_BYTES, last, HUGE_BYTES)
        for page in pages:  # only what is not empty can be joined; this keeps what is there
            os.posix_fallocate(self._file, max(page, first), 1)
        return all(map(self._join, pages))

    def _join(self, page: int) -> bool:
        """Makes a huge page of the small ones from a byte on; returns False if it should not."""
        for _ in range(NUM_TRIES):
            if not self._works:
                break
            start = time.perf_counter()
            if _libc().madvise(self._address + page, HUGE_BYTES, MADV_COLLAPSE) == 0:
                self._works = time.perf_counter() - start < SLOW_S
                return True
            if ctypes.get_errno() not in PASSING:
                self._works = False
        return False


class HugeMemory:
    """Private memory, in huge pages as long as they are not slow.

    Args:
        num_bytes: Its size.

    Attributes:
        memory: The memory.

    Raises:
        OSError: There is no address space.
    """

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.memory = mmap.mmap(-1, num_bytes, flags=flags)
        self._bytes = np.frombuffer(self.memory, np.uint8)
        self._is_huge = True
        with suppress(OSError):  # the kernel may have no huge pages
            self.memory.madvise(mmap.MADV_HUGEPAGE)

    def prepare(self, first: int, last: int) -> None:
        """Tries one page of the bytes from `first` to before `last`, which are not in use yet."""
        begin = first + -(self._bytes.ctypes.data + first) % HUGE_BYTES
        if not self._is_huge or begin >= last:
            return
        start = time.perf_counter()
        self._bytes[begin] = 0
        if time.perf_counter() - start >= SLOW_S:
            self._is_huge = False
            rest = begin + HUGE_BYTES
            if rest < len(self._bytes):
                with suppress(OSError):
                    self.memory.madvise(mmap.MADV_NOHUGEPAGE, rest, len(self._bytes) - rest)
