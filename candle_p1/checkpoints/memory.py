"""The memory that holds a copy of the state while it is written."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
TOUCH_BYTES = 64 << 20


class CopyMemory:
    """Page-aligned memory, in whole pages, as writing past the page cache requires.

    The kernel provides memory page by page when it is first written to, which takes longer than the
    copying; `touch` does so ahead, on a thread.

    Args:
        num_bytes: How much of it is used.

    Attributes:
        num_bytes: How much of it is used.
        bytes: The memory, including the rest of the last page.
        buffer: The same memory, for calls of the operating system.

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
        self._touching: threading.Thread | None = None
        self._stop = threading.Event()

    def touch(self) -> None:
        """Begins to have the memory provided, and returns."""
        self._touching = threading.Thread(target=self._touch, name="touch memory", daemon=True)
        self._touching.start()

    def settle(self) -> None:
        """Ends what `touch` has begun; must be called before the memory is written to."""
        if self._touching is not None:
            self._stop.set()
            self._touching.join()
            self._touching = None

    def _touch(self) -> None:
        for begin in range(0, len(self.bytes), TOUCH_BYTES):
            if self._stop.is_set():
                return
            self.bytes[begin : begin + TOUCH_BYTES : PAGE_BYTES] = 0

    def view(self, first_byte: int, num_bytes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns a part of the memory as elements of a type, one-dimensional."""
        return self.bytes[first_byte : first_byte + num_bytes].view(dtype)
