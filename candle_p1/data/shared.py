"""Arrays of which the ranks of a node share one copy.

They are in a file in memory (or on disk, if shared memory is too small) that every rank of the node
maps, in huge pages where that is possible, and that has been unlinked, so that it vanishes with the
last of them. Users get the arrays read-only; with candle_p1.data.transforms, all ranks change them
together, each its share.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from candle_p1.data.huge_pages import HUGE_BYTES, HugeFile, HugeMemory
from candle_p1.distributed.comm import Communicator, SerialCommunicator
from candle_p1.distributed.shared_file import (
    MEMORY,
    NoRoomError,
    NotSharedError,
    agree_on_room,
    check_room,
    open_nameless,
)
from candle_p1.errors import DataError
from candle_p1.scaling import share_bounds

T = TypeVar("T")

SMALLEST_FILL_BYTES = HUGE_BYTES // 4
"""What is smaller is not worth a huge page."""


class NodeArray:
    """An array that the ranks of a node write together. Creating one is collective over the node.

    Memory is allocated as elements are written; ranks that share the array use `write`, or call
    `fill` or `reserve` first. A single process has the array in its own memory.

    Args:
        shape: The shape, rows first; `keep` may reduce their number.
        dtype: The type of the elements.
        node: The ranks of this node.
        directory: Where its file is created.

    Attributes:
        array: The array, writable.

    Raises:
        NoRoomError: The file cannot be created; the same on the node's ranks.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        node: Communicator,
        directory: Path = MEMORY,
    ) -> None:
        self._node, self._directory, self._file = node, directory, -1
        self._huge: HugeFile | None = None
        self._private: HugeMemory | None = None
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if num_bytes == 0:
            self.array: NDArray[Any] = np.empty(shape, dtype)
            return
        try:
            if node.size == 1:
                self._private = HugeMemory(num_bytes)
                memory: Any = self._private.memory
            else:
                file_bytes = -(-num_bytes // HUGE_BYTES) * HUGE_BYTES
                self._file = open_nameless(directory, file_bytes, node)
                self._huge = HugeFile(self._file, file_bytes, in_memory=directory == MEMORY)
                memory = self._huge.memory
                memory.node = node  # for sharers()
        except NoRoomError:
            raise
        except OSError as error:
            raise DataError(
                f"no address space for {num_bytes / 2**30:.1f} GiB ({error.strerror}), most of"
                " which would remain unused: raise the limit (ulimit -v)",
                directory,
            ) from error
        self.array = np.frombuffer(memory, dtype, num_bytes // np.dtype(dtype).itemsize)
        self.array = self.array.reshape(shape)

    def reserve(self, first: int, last: int) -> None:
        """Allocates the memory for some elements, by index, so that writing them cannot fail.

        Called only by the rank that writes them.

        Raises:
            NoRoomError: There is not enough memory.
        """
        if self._file >= 0 and first < last:
            size, used = self.array.itemsize, 512 * os.fstat(self._file).st_blocks
            with self._room(self.array.nbytes - used):  # also for what other ranks reserve
                os.posix_fallocate(self._file, first * size, (last - first) * size)

    def fill(self, first: int, last: int) -> bool:
        """Allocates huge pages for some elements, by index, if that is possible and worth it.

        Returns whether they may be stored to directly, without an error for lack of room; a single
        process always may. Otherwise, `write` is faster. Called only by the rank that writes them,
        before it does.

        Raises:
            NoRoomError: There is not enough memory.
        """
        size = self.array.itemsize
        if self._private is not None:
            self._private.prepare(first * size, last * size)
            return True
        if self._huge is None or (last - first) * size < SMALLEST_FILL_BYTES:
            return False
        with self._room((last - first) * size * self._node.size):
            return self._huge.fill(first * size, last * size)

    def write(self, first: int, elements: NDArray[Any]) -> None:
        """Writes elements through the file, which is cheaper than a page fault for every 4 KiB.

        Args:
            first: The index of the first element.
            elements: C-contiguous, of the same dtype.

        Raises:
            NoRoomError: There is not enough memory for them.
        """
        raw: Any = elements.reshape(-1).view(np.uint8)
        content = memoryview(raw)
        done, start = 0, first * self.array.itemsize
        with self._room(len(content) * self._node.size):
            while done < len(content):
                done += os.pwrite(self._file, content[done:], start + done)

    @contextmanager
    def _room(self, num_bytes: int) -> Iterator[None]:
        """Checks that there is room; converts the errors of a full file system into NoRoomError."""
        try:
            check_room(self._file, num_bytes, self._directory, self._node.size)
            yield
        except OSError as error:
            raise NoRoomError(
                f"no space for the data that the ranks of a node share: {error.strerror}",
                self._directory,
            ) from error

    def keep(self, num_rows: int) -> NDArray[Any]:
        """Returns the first rows, read-only if they are shared, and frees the rest."""
        kept = self.array[:num_rows]
        if self._file >= 0:
            if self._node.rank == 0:
                os.ftruncate(self._file, max(kept.nbytes, 1))
            os.close(self._file)
            self._file = -1
            kept.flags.writeable = False
        return kept


def allocate(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    node: Communicator,
    notify: Callable[[str], None] | None = None,
) -> NodeArray:
    """Returns an array whose memory is already allocated; collective over the node.

    `notify` is called as by `try_directories`.

    Raises:
        DataError: There is no space in memory or on disk; the same on the node's ranks.
    """

    def reserved(directory: Path) -> NodeArray:
        array = NodeArray(shape, dtype, node, directory)
        bounds = share_bounds(array.array.size, node.rank, node.size)
        try:
            agree_on_room(node, lambda: array.reserve(*bounds))
        except NoRoomError:
            array.keep(0)  # some ranks may have allocated their parts
            raise
        return array

    return try_directories(reserved, node, notify)


def try_directories(
    make: Callable[[Path], T], node: Communicator, notify: Callable[[str], None] | None
) -> T:
    """Returns what `make` returns for a directory in memory or, if that is too small, on disk.

    `make` raises NoRoomError on all ranks; `notify` is called, on one of them, if the disk is used
    for lack of room.

    Raises:
        DataError: There is no space in either.
    """
    try:
        return make(MEMORY)
    except NoRoomError as error:
        disk = Path(tempfile.gettempdir())
        if notify and node.rank == 0 and not isinstance(error, NotSharedError):
            notify(
                f"{error}; using a file in {disk}, which may be slower. In a container, enlarge"
                f" {MEMORY} with --shm-size"
            )
        try:
            return make(disk)
        except NotSharedError:
            raise
        except NoRoomError as second:
            raise DataError(
                f"{second.problem}, nor in {MEMORY}: enlarge {MEMORY} (in a container, with"
                " --shm-size), or set TMPDIR to a directory with enough space",
                disk,
            ) from error


def sharers(array: NDArray[Any]) -> Communicator:
    """Returns the ranks that share this memory; just this one if it is not shared."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    shared = isinstance(owner, ctypes.Array) and hasattr(owner, "node")
    return owner.node if shared else SerialCommunicator()


def writable(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a writable view of shared memory, for use by all its sharers together."""
    view = array.view()
    if sharers(array).size > 1:
        view.flags.writeable = True
    return view
