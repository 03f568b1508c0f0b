"""Arrays of which the ranks of a node share one copy.

They are in a file in memory (or on disk, if shared memory is too small) that every rank of the node
maps, and that has been unlinked, so that it vanishes with the last of them. Users get the arrays
read-only; with candle_p1.data.transforms, all ranks change them together, each its share. MPI says
which ranks are on a machine, but they may be in containers that do not see each other's files; see
`agree_on_sharing`.

Memory is in huge pages where that is possible. Linux gives files in ``/dev/shm`` small pages unless
the administrator allows others: a store then costs a page fault for every 4 KiB, and those who
write through the file wait for each other. On request, it joins the pages of a part of a file into
huge ones, whatever that setting is (``MADV_COLLAPSE``, since Linux 6.1). Where it does not, callers
write through the file.

The host of a virtual machine can have taken back its free memory, in large pieces. A huge page
then costs hundreds of exchanges with the host, while small pages come from fragments that it has
left. So no more huge pages are asked for once one has taken SLOW_S.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from candle_p1.distributed import shared_file
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
from candle_p1.text import count

T = TypeVar("T")

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
SMALLEST_FILL_BYTES = HUGE_BYTES // 4
"""What is smaller is not worth a huge page."""


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
        self.memory: Any = (ctypes.c_char * num_bytes).from_address(self._address)
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

    def fill(self, first: int, last: int) -> bool:
        """Tries one page of the bytes from `first` to before `last`, which are not in use yet.

        Returns True, because stores are always possible.
        """
        begin = first + -(self._bytes.ctypes.data + first) % HUGE_BYTES
        if not self._is_huge or begin >= last:
            return True
        start = time.perf_counter()
        self._bytes[begin] = 0
        if time.perf_counter() - start >= SLOW_S:
            self._is_huge = False
            rest = begin + HUGE_BYTES
            if rest < len(self._bytes):
                with suppress(OSError):
                    self.memory.madvise(mmap.MADV_NOHUGEPAGE, rest, len(self._bytes) - rest)
        return True


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
        self._pages: HugeFile | HugeMemory | None = None
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if num_bytes == 0:
            self.array: NDArray[Any] = np.empty(shape, dtype)
            return
        try:
            if node.size == 1:
                self._pages = HugeMemory(num_bytes)
            else:
                file_bytes = -(-num_bytes // HUGE_BYTES) * HUGE_BYTES
                self._file = open_nameless(directory, file_bytes, node)
                self._pages = HugeFile(self._file, file_bytes, in_memory=directory == MEMORY)
                self._pages.memory.node = node  # for sharers()
        except OSError as error:
            raise DataError(
                f"no address space for {num_bytes / 2**30:.1f} GiB ({error.strerror}), most of"
                " which would remain unused: raise the limit (ulimit -v)",
                directory,
            ) from error
        num = num_bytes // np.dtype(dtype).itemsize
        self.array = np.frombuffer(self._pages.memory, dtype, num).reshape(shape)

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
        begin, end = first * self.array.itemsize, last * self.array.itemsize
        if self._pages is None or self._file < 0:
            return self._pages is None or self._pages.fill(begin, end)
        if end - begin < SMALLEST_FILL_BYTES:
            return False
        with self._room((end - begin) * self._node.size):
            return self._pages.fill(begin, end)

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


def agree_on_sharing(comm: Communicator) -> tuple[Communicator, str | None]:
    """Finds out which ranks can share data: those that see each other's files; collective.

    Usually these are all ranks of a node, which costs each a file and a small message. If they are
    in containers that have a ``/dev/shm`` of their own, they share data in a file in the directory
    for temporary files, if they have that in common, and otherwise each has a copy.

    Returns:
        The ranks, on nodes whose ranks can share data, and a warning for the user, the same on all
        ranks; None if all is as usual.
    """
    memory = shared_file.MEMORY
    seen = _first_seen(memory, comm.local)
    if not comm.any(seen > 0):
        return comm, None
    try:
        disk = Path(tempfile.gettempdir())
    except FileNotFoundError:  # none can be written to, which the other ranks find out by asking
        disk = Path("/tmp")
    advice = f"start the containers so that they see the node's {memory}"
    who = f"ranks of a node do not see each other's files in {memory}"
    if not comm.any(_first_seen(disk, comm.local) > 0):
        how = f"they share data in a file in {disk}, which may be slower"
        return comm, f"{who}: {how}; {advice}"
    divided = comm.split_nodes(seen)
    copies = f"{count(comm.num_nodes, 'node')} will hold {divided.num_nodes} copies of the data"
    return divided, f"{who}, nor in {disk}: {copies}; {advice}"


def _first_seen(directory: Path, node: Communicator) -> int:
    """Returns the node's first rank whose file this rank sees, or itself; collective over it."""
    with ExitStack() as stack:
        name = None
        with suppress(OSError):
            mark = tempfile.NamedTemporaryFile(prefix="candle_p1-", dir=directory)  # noqa: SIM115
            name = stack.enter_context(mark).name
        names = node.allgather(name)
        seen = (rank for rank, name in enumerate(names) if name and Path(name).exists())
        first = next(seen, node.rank)
        node.barrier()
    return first
