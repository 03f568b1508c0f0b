"""The communicator: one interface for one process and for many under an MPI launcher.

Small objects and arrays travel by mpi4py; gradients by Horovod (candle_p1.distributed.keras).
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from candle_p1.environment import launcher_variable
from candle_p1.errors import CandleError, DistributedError, SetupError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from numpy.typing import NDArray

T = TypeVar("T")


class Communicator(ABC):
    """The ranks of a job.

    Every method but `abort` is collective: all ranks must call it, in the same order.

    Attributes:
        rank: This rank, from 0.
        size: The number of ranks.
        node: This rank's node, from 0.
        num_nodes: The number of nodes.
        local_rank: This rank within its node, from 0.
        local_size: The ranks of this node.
    """

    rank: int
    size: int
    node: int
    num_nodes: int
    local_rank: int
    local_size: int

    @abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have called it."""

    @abstractmethod
    def broadcast(self, value: T, root: int = 0) -> T:
        """Returns the root's value, a small picklable object, on every rank."""

    @abstractmethod
    def allgather(self, value: T) -> list[T]:
        """Returns every rank's value, a small picklable object, in the order of ranks."""

    @abstractmethod
    def gather(self, value: T) -> list[T] | None:
        """Returns every rank's value, a picklable object, on rank 0; None on the others."""

    @abstractmethod
    def allreduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the sum over ranks of an array of one shape and dtype; the same on every rank."""

    @abstractmethod
    def abort(self, code: int) -> NoReturn:
        """Ends all ranks at once with an exit code, without their consent."""


class SerialCommunicator(Communicator):
    """One process."""

    rank, size = 0, 1
    node, num_nodes = 0, 1
    local_rank, local_size = 0, 1

    def barrier(self) -> None:
        """Does nothing."""

    def broadcast(self, value: T, root: int = 0) -> T:
        """Returns the value."""
        return value

    def allgather(self, value: T) -> list[T]:
        """Returns [value]."""
        return [value]

    def gather(self, value: T) -> list[T] | None:
        """Returns [value]."""
        return [value]

    def allreduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns a copy."""
        return array.copy()

    def abort(self, code: int) -> NoReturn:
        """Ends this process."""
        sys.exit(code)


class MpiCommunicator(Communicator):
    """The ranks an MPI launcher started.

    Nodes are found by shared memory: ranks that can share it are on one node.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._sum = MPI.SUM
        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        local = self._world.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank, self.local_size = local.rank, local.size
        leaders = local.bcast(self.rank)
        nodes = sorted(set(self._world.allgather(leaders)))
        self.node, self.num_nodes = nodes.index(leaders), len(nodes)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._world.Barrier()

    def broadcast(self, value: T, root: int = 0) -> T:
        """Returns the root's value."""
        received: T = self._world.bcast(value, root)
        return received

    def allgather(self, value: T) -> list[T]:
        """Returns every rank's value."""
        return self._world.allgather(value)

    def gather(self, value: T) -> list[T] | None:
        """Returns every rank's value on rank 0."""
        return self._world.gather(value)

    def allreduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the sum over ranks."""
        total = np.empty_like(array, order="C")
        self._world.Allreduce(np.ascontiguousarray(array), total, op=self._sum)
        return total

    def abort(self, code: int) -> NoReturn:
        """Ends all ranks through MPI_Abort."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._world.Abort(code)
        raise AssertionError("MPI_Abort returned")


_communicator: Communicator | None = None


def connect() -> Communicator:
    """Returns the communicator of this job; collective at the first call, the same object later.

    A single process, also one under a launcher, gets the serial one and needs neither MPI nor
    Horovod.

    Raises:
        SetupError: A launcher started this process and mpi4py or its MPI library is missing.
    """
    global _communicator
    if _communicator is None:
        _communicator = _connect()
    return _communicator


def _connect() -> Communicator:
    launcher = launcher_variable()
    if launcher is None:
        return SerialCommunicator()
    try:
        mpi = MpiCommunicator()
    except (ImportError, RuntimeError) as error:  # no mpi4py; no MPI library it can load
        if os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE")) == "1":
            return SerialCommunicator()
        raise SetupError(
            f"an MPI launcher started this process ({launcher} is set) but mpi4py cannot be used:"
            f" {error}. Install candle-p1[cpu] or candle-p1[gpu], or start one process without"
            " the launcher"
        ) from error
    return mpi if mpi.size > 1 else SerialCommunicator()


class Attempt(Generic[T]):
    """Work that each rank does by itself, whose errors all ranks agree upon afterwards.

    ::

        attempt = Attempt(load)          # no communication: a fast rank does not wait here
        data = attempt.agree(comm)       # all ranks meet; if any failed, all raise the same error
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._result: T
        self._error: CandleError | None = None
        try:
            self._result = work()
        except CandleError as error:
            self._error = error

    def agree(self, comm: Communicator) -> T:
        """Returns the result; collective.

        Raises:
            CandleError: The work failed on some rank: its own error where all ranks had the same,
                else one that names the ranks. The same on every rank; `agreed` says so.
        """
        errors = comm.allgather(self._error)
        failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return self._result
        messages = [str(error) for _, error in failed]
        if len(failed) == comm.size and len(set(messages)) == 1:
            error = failed[0][1]
        else:
            error = DistributedError(
                "; ".join(f"rank {rank}: {error}" for rank, error in failed[:4])
                + (f"; and {len(failed) - 4} ranks more" if len(failed) > 4 else "")
            )
        raise error.on_all_ranks()
