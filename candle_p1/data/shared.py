"""Arrays that the ranks of a node have once, together.

They lie in a file in memory (or on disk, where memory for that is short) that every rank of the
node maps and that has no name any more: it goes with the last of them. Users get them read-only;
what changes them (candle_p1.data.transforms) does so together, each rank a share.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError
from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import DTypeLike, NDArray

    from candle_p1.distributed.comm import Communicator

T = TypeVar("T")

MEMORY = Path("/dev/shm")
"""Files here lie in memory."""
ROOM_LEFT = 0.05
"""Share of a file system which is not taken."""


class NoRoomError(DataError):
    """A directory has no room for what the ranks of a node share."""


class _Mapping(mmap.mmap):
    """Mapped memory that knows the ranks that share it."""

    node: Communicator


class NodeArray:
    """An array that the ranks of a node write together. Collective over the node.

    Its memory is taken as it is written; where ranks share it, by `write`, or after `reserve`. One
    process has it to itself, in memory of its own.

    Args:
        shape: Rows first; there may be fewer in the end, see `keep`.
        dtype: Of the elements.
        node: The ranks of this node.
        directory: Where its file is made.

    Attributes:
        array: Writable.

    Raises:
        NoRoomError: The file cannot be made; the same on the node's ranks.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        node: Communicator,
        directory: Path = MEMORY,
    ) -> None:
        self._node, self._directory, self._file = node, directory, -1
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if num_bytes == 0:
            self.array: NDArray[Any] = np.empty(shape, dtype)
            return
        if node.size == 1:
            # Python 3.10 does not name the last.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            try:
                mapping = _Mapping(-1, num_bytes, flags=flags)
            except OSError as error:
                raise DataError(
                    f"no address space for {num_bytes / 2**30:.1f} GiB ({error.strerror}), most of"
                    " which stays unused: raise the limit (ulimit -v)",
                    directory,
                ) from error
            with suppress(OSError):  # a kernel without them
                mapping.madvise(mmap.MADV_HUGEPAGE)
        else:
            self._file = _open_nameless(directory, num_bytes, node)
            mapping = _Mapping(self._file, num_bytes)
        mapping.node = node
        self.array = np.frombuffer(mapping, dtype).reshape(shape)

    def reserve(self, first: int, last: int) -> None:
        """Takes the room of some elements, by their number in memory: writing them cannot fail.

        By one rank, of what this rank writes.

        Raises:
            NoRoomError: There is none.
        """
        if self._file >= 0 and first < last:
            size = self.array.itemsize
            with self._room():
                os.posix_fallocate(self._file, first * size, (last - first) * size)

    def write(self, first: int, elements: NDArray[Any]) -> None:
        """Writes elements from a place on, by their number in memory, through the file.

        That takes their room, too, and costs less than a page fault for every 4 KiB.

        Args:
            first: Where.
            elements: C-contiguous, of the same dtype.

        Raises:
            NoRoomError: There is no room for them.
        """
        raw: Any = elements.reshape(-1).view(np.uint8)
        content = memoryview(raw)
        done, start = 0, first * self.array.itemsize
        with self._room():
            while done < len(content):
                done += os.pwrite(self._file, content[done:], start + done)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Turns the errors of a full file system into NoRoomError."""
        try:
            status = os.fstatvfs(self._file)
            if status.f_bavail < ROOM_LEFT * status.f_blocks:
                raise OSError(None, f"{status.f_bavail * status.f_frsize >> 20} MiB are left")
            yield
        except OSError as error:
            raise NoRoomError(
                f"no room for the data that the ranks of a node share: {error.strerror}",
                self._directory,
            ) from error

    def keep(self, num_rows: int) -> NDArray[Any]:
        """Returns the first rows, read-only where they are shared, and gives back the rest."""
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
    """Returns an array all of whose room is taken; collective over the node.

    Args:
        shape: Of the array.
        dtype: Of its elements.
        node: The ranks of this node.
        notify: See `try_directories`.

    Raises:
        DataError: There is no room, in memory or on disk; the same on the node's ranks.
    """

    def reserved(directory: Path) -> NodeArray:
        array = NodeArray(shape, dtype, node, directory)
        bounds = share_bounds(array.array.size, node.rank, node.size)
        agree_on_room(lambda: array.reserve(*bounds), node)
        return array

    return try_directories(reserved, node, notify)


def try_directories(
    make: Callable[[Path], T], node: Communicator, notify: Callable[[str], None] | None
) -> T:
    """Returns what can be made in memory, else on disk.

    Args:
        make: Takes the directory of the files; raises NoRoomError on all ranks alike.
        node: The ranks of this node.
        notify: Is told, on one of them, where it has to be the disk.

    Raises:
        DataError: There is no room in either.
    """
    try:
        return make(MEMORY)
    except NoRoomError as error:
        disk = Path(tempfile.gettempdir())
        if notify and node.rank == 0:
            notify(
                f"{error}: they lie in a file in {disk}, which may be slower; in a container, give"
                " more by --shm-size"
            )
        try:
            return make(disk)
        except NoRoomError as second:
            raise DataError(
                f"{second.problem}, and neither in {MEMORY}: enlarge it (in a container,"
                " --shm-size), or set TMPDIR to a directory with room",
                disk,
            ) from error


def sharers(array: NDArray[Any]) -> Communicator:
    """Returns the ranks that have this memory together; the one alone, as a rule."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner.node if isinstance(owner, _Mapping) else SerialCommunicator()


def writable(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a view of shared memory that can be written: to be used by all sharers together."""
    view = array.view()
    if sharers(array).size > 1:
        view.flags.writeable = True
    return view


def _open_nameless(directory: Path, num_bytes: int, node: Communicator) -> int:
    """Returns an open file of this size, without room yet; collective."""

    def make() -> str | None:
        if node.rank != 0:
            return None
        try:
            file, name = tempfile.mkstemp(prefix="candle_p1-", dir=directory)
        except OSError as error:
            raise NoRoomError(
                f"no file for the data that the ranks of a node share: {error.strerror}", directory
            ) from error
        os.truncate(file, num_bytes)
        os.close(file)
        return name

    name = node.broadcast(agree_on_room(make, node))
    assert name is not None
    try:
        return agree_on_room(lambda: os.open(name, os.O_RDWR), node)
    finally:
        if node.rank == 0:
            Path(name).unlink()


def agree_on_room(work: Callable[[], T], ranks: Communicator) -> T:
    """Returns what a rank's work gives; one rank's NoRoomError is raised on all; collective."""
    error = None
    try:
        result = work()
    except NoRoomError as caught:
        error = caught
    errors = [found for found in ranks.allgather(error) if found is not None]
    if errors:
        raise errors[0]
    return result
