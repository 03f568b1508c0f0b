"""Arrays that the ranks of a node have once, together.

They lie in a file in memory (or on disk, where memory for that is short) that every rank of the
node maps and that has no name any more: it goes with the last of them. Users get them read-only;
what changes them (candle_p1.data.transforms) does so together, each rank a share.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed.comm import Attempt, SerialCommunicator
from candle_p1.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike, NDArray

    from candle_p1.distributed.comm import Communicator

DIRECTORY = Path("/dev/shm")
"""Files here lie in memory."""
ROOM_LEFT = 0.05
"""Share of that memory which is not taken."""


class _Mapping(mmap.mmap):
    """A mapped file that knows the ranks that share it."""

    node: Communicator


class NodeArray:
    """An array that the ranks of a node write together. Collective over the node.

    One process has it to itself, in its own memory.

    Args:
        shape: Rows first; there may be fewer in the end, see `keep`.
        dtype: Of the elements.
        node: The ranks of this node.
        notify: Is told, on one rank, where memory is short and the array goes to disk.

    Attributes:
        array: Writable.

    Raises:
        DataError: There is no room for it, in memory or on disk; the same on the node's ranks.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        node: Communicator,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self._node, self._file = node, -1
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if node.size == 1 or num_bytes == 0:
            self.array: NDArray[Any] = np.empty(shape, dtype)
            return
        made = Attempt(lambda: _reserve(num_bytes, notify) if node.rank == 0 else None)
        path = node.broadcast(made.agree(node))
        assert path is not None

        def open_file() -> int:
            try:
                return os.open(path, os.O_RDWR)
            except OSError as error:
                raise DataError(f"cannot open the node's memory: {error.strerror}", path) from error

        try:
            self._file = Attempt(open_file).agree(node)
        finally:
            if node.rank == 0:
                path.unlink()
        mapping = _Mapping(self._file, num_bytes)
        mapping.node = node
        self.array = np.frombuffer(mapping, dtype).reshape(shape)

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
    if not isinstance(sharers(array), SerialCommunicator):
        view.flags.writeable = True
    return view


def _reserve(num_bytes: int, notify: Callable[[str], None] | None) -> Path:
    """Returns a new file of this size, whose room is taken: writing to it cannot fail."""
    problem = None
    for directory in (DIRECTORY, Path(tempfile.gettempdir())):
        try:
            usage = shutil.disk_usage(directory)
            if usage.free - ROOM_LEFT * usage.total < num_bytes:
                raise OSError(None, f"{usage.free / 2**20:.0f} MiB are free")
            file, name = tempfile.mkstemp(prefix="candle_p1-", dir=directory)
            try:
                os.posix_fallocate(file, 0, num_bytes)
            except OSError:
                Path(name).unlink()
                raise
            finally:
                os.close(file)
        except OSError as error:
            reason = f"{directory}: {error.strerror}"
            problem = f"{problem}; {reason}" if problem else reason
        else:
            if problem and notify:
                notify(
                    f"no shared memory for {num_bytes / 2**20:.0f} MiB ({problem}): the data lie in"
                    f" a file in {directory}, which may be slower; in a container, --shm-size"
                )
            return Path(name)
    raise DataError(
        f"no room for {num_bytes / 2**20:.0f} MiB of data that the ranks of a node share"
        f" ({problem}): enlarge /dev/shm (in a container, --shm-size), or set TMPDIR to a directory"
        " with room",
        directory,
    )
