"""Files in memory, or on disk, that the ranks of a node map to share what is in them."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from candle_p1.distributed.comm import Communicator, on_first_rank
from candle_p1.errors import DataError

T = TypeVar("T")

MEMORY = Path("/dev/shm")
"""Files in this directory are in memory."""
MPI_BYTES = 16 << 20
"""How much of MEMORY the messages of a rank can take, later too: Open MPI's btl_sm_segment_size."""


class NoRoomError(DataError):
    """A directory has no space for data that the ranks of a node share."""


class NotSharedError(NoRoomError):
    """The ranks of a node do not see the same files in a directory."""


def open_nameless(directory: Path, num_bytes: int, node: Communicator) -> int:
    """Returns an open file of this size that uses no memory yet; collective.

    Raises NoRoomError on all ranks if there is none that all of them see.
    """

    def create() -> str:
        try:
            file, name = tempfile.mkstemp(prefix="candle_p1-", dir=directory)
        except OSError as error:
            raise NoRoomError(
                f"cannot create a file for data that the ranks of a node share: {error.strerror}",
                directory,
            ) from error
        os.truncate(file, num_bytes)
        os.close(file)
        return name

    name = on_first_rank(node, create)
    opened: list[int] = []

    def open_file() -> int:
        try:
            opened.append(os.open(name, os.O_RDWR))
        except OSError as error:
            raise NotSharedError(
                f"ranks of a node do not see each other's files ({error.strerror}), so they cannot"
                " share data: give their containers a common directory",
                directory,
            ) from error
        return opened[0]

    try:
        return agree_on_room(node, open_file)
    except NoRoomError:
        for file in opened:  # a rank that can open it would keep it for ever
            os.close(file)
        raise
    finally:
        if node.rank == 0:
            Path(name).unlink()


def check_room(file: int, num_bytes: int, directory: Path, num_ranks: int) -> None:
    """Raises OSError if an open file may not grow by some bytes, with so many ranks on this node.

    There would be too little room left, for MPI in MEMORY, which dies of SIGBUS.
    """
    status = os.fstatvfs(file)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    left = max(0.05 * total, min(MPI_BYTES * num_ranks, total / 2) * (directory == MEMORY))
    if total and free - num_bytes < left:  # 0: a file system in memory without a limit
        need = f"{free >> 20} MiB are free, of which {int(left) >> 20} must remain free"
        raise OSError(errno.ENOSPC, need)


def agree_on_room(ranks: Communicator, work: Callable[[], T]) -> T:
    """Returns the result of a rank's work; a NoRoomError of one is raised on all; collective."""
    error = None
    try:
        result = work()
    except NoRoomError as caught:
        error = caught
    found = ranks.first(error)
    if found:
        raise found[1]
    return result
