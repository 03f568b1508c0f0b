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
PATIENCE_S = 0.2
"""After how long a thread that waits for memory to be filled sees that it should stop."""


class CopyMemory:
    """Page-aligned memory, in whole pages, as writing past the page cache requires.

    The kernel provides memory page by page when it is first written to, which takes longer than the
    copying; `touch` does so ahead, on a thread. One thread fills the memory from its beginning, and
    another may already use what is filled.

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
        self._filled = 0
        self._more = threading.Condition()

    def touch(self) -> None:
        """Begins to have the memory provided, and returns."""
        self._touching = threading.Thread(target=self._touch, name="touch memory", daemon=True)
        self._touching.start()

    def begin(self) -> None:
        """Must be called before the memory is filled anew."""
        self._stop.set()
        if self._touching is not None:
            self._touching.join()
            self._touching = None
        self._filled = 0

    def filled(self, end: int) -> None:
        """Tells that the memory is filled up to, but without, a byte."""
        with self._more:
            self._filled = end
            self._more.notify_all()

    def await_filled(self, end: int, stop: threading.Event) -> bool:
        """Waits until the memory is filled up to a byte; returns whether it is.

        It is not if `stop` is set.
        """
        with self._more:
            while self._filled < end and not stop.is_set():
                self._more.wait(PATIENCE_S)
            return self._filled >= end and not stop.is_set()

    def _touch(self) -> None:
        for begin in range(0, len(self.bytes), TOUCH_BYTES):
            if self._stop.is_set():
                return
            self.bytes[begin : begin + TOUCH_BYTES : PAGE_BYTES] = 0

    def view(self, first_byte: int, num_bytes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns a part of the memory as elements of a type, one-dimensional."""
        return self.bytes[first_byte : first_byte + num_bytes].view(dtype)
