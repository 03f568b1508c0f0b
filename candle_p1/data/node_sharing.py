"""Which ranks of a node can share data: those that see each other's files.

MPI says which ranks are on a machine. They may be in containers, one for each rank, that have a
``/dev/shm`` of their own. The ranks then share data through a file in the directory for temporary
files, if they have that in common, and otherwise each has a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir
from typing import NamedTuple

from candle_p1.distributed import shared_file
from candle_p1.distributed.comm import Communicator
from candle_p1.text import count

ADVICE = f"start the containers so that they see the node's {shared_file.MEMORY}"


class NodeSharing(NamedTuple):
    """How the ranks of a job share data.

    Attributes:
        comm: The ranks, on nodes whose ranks can share data.
        warning: What is not as usual, for the user; None if all is.
    """

    comm: Communicator
    warning: str | None = None


def agree_on_sharing(comm: Communicator) -> NodeSharing:
    """Finds out which ranks can share data; collective, and the same warning on all ranks.

    Usually these are all ranks of a node, which costs a file and a small message.
    """
    memory = shared_file.MEMORY
    if not comm.any(not _sees_first(memory, comm.local)):
        return NodeSharing(comm)
    disk = _temporary_directory()
    who = f"ranks of a node do not see each other's files in {memory}"
    if not comm.any(not _sees_first(disk, comm.local)):
        return NodeSharing(
            comm, f"{who}: they share data in a file in {disk}, which may be slower; {ADVICE}"
        )
    divided = comm.split_nodes(_first_seen(memory, comm.local))
    return NodeSharing(
        divided,
        f"{who}, nor in {disk}: {count(comm.num_nodes, 'node')} will hold {divided.num_nodes}"
        f" copies of the data; {ADVICE}",
    )


def _temporary_directory() -> Path:
    try:
        return Path(gettempdir())
    except FileNotFoundError:  # none can be written to, which the other ranks find out by asking
        return Path("/tmp")


@contextmanager
def _mark(directory: Path) -> Iterator[str | None]:
    """Makes a file that the body can look for; yields its path, None if it cannot be made."""
    with ExitStack() as stack:
        name = None
        with suppress(OSError):
            name = stack.enter_context(NamedTemporaryFile(prefix="candle_p1-", dir=directory)).name
        yield name


def _sees_first(directory: Path, node: Communicator) -> bool:
    """Whether this rank sees a file that the node's first rank makes; collective over the node."""
    if node.size == 1:
        return True
    with _mark(directory) if node.rank == 0 else nullcontext() as mine:
        name = node.broadcast(mine)
        sees = name is not None and Path(name).exists()
        node.barrier()
    return sees


def _first_seen(directory: Path, node: Communicator) -> int:
    """Returns the first rank of the node whose file this rank sees; collective over the node."""
    with _mark(directory) as mine:
        names = node.allgather(mine)
        seen = (rank for rank, name in enumerate(names) if name and Path(name).exists())
        first = next(seen, node.rank)
        node.barrier()
    return first
