"""The communicator: one interface for a single process and for the ranks of an MPI job.

It transfers small objects and arrays through mpi4py; gradients go through a reducer
(candle_p1.distributed.reducers). The module is long because the interface, its two implementations
and what ranks agree on through it are best read together.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from candle_p1.distributed.launch_environment import (
    NODE_VARIABLE,
    SINGLE_PROCESS_VARIABLE,
    LaunchedRank,
    launched_rank,
    launcher_variable,
    limits_from_environment,
    terminal,
)
from candle_p1.errors import CandleError, DistributedError, SetupError
from candle_p1.failure import _native, agent
from candle_p1.failure.progress import FOR_ALL, FOR_SOME, waiting
from candle_p1.instrument.collectives import collective

T = TypeVar("T")
P = ParamSpec("P")


class Communicator(ABC):
    """The ranks of a job.

    All methods are collective, which means that all ranks must call them, in the same order. The
    exceptions are `send` and `receive` with their forms for bytes, which the two ranks of a message
    call, and `abort`, which any rank may call. Ranks and nodes are numbered from 0.
    """

    rank: int
    size: int
    node: int
    num_nodes: int
    local_rank: int  # this rank within its node
    local_size: int
    local: Communicator  # the ranks on this node
    start_s = 0.0  # how long MPI took to start

    @abstractmethod
    def barrier(self) -> None:
        """Returns once all ranks have called it; collective."""

    @abstractmethod
    def broadcast(self, value: T, root: int = 0) -> T:
        """Returns the root's value, a small picklable object, on every rank; collective."""

    @abstractmethod
    def allgather(self, value: T) -> list[T]:
        """Returns every rank's value, a small picklable object, on every rank; collective."""

    @abstractmethod
    def gather(self, value: T) -> list[T] | None:
        """Returns every rank's value, a picklable object, on rank 0, else None; collective."""

    @abstractmethod
    def allreduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the sum of all ranks' arrays, of the same shape and dtype; collective."""

    @abstractmethod
    def allreduce_max(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the elementwise maximum of all ranks' arrays, of the same shape; collective."""

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank; collective, and costs one number."""
        return bool(self.allreduce_max(np.array([flag], np.uint8))[0])

    def collect(self, value: T | None) -> list[tuple[int, T]]:
        """Returns the ranks that have a value, with their values, on every rank; collective.

        Where no rank has one, which is the usual case for errors, this costs one number. Otherwise,
        every rank receives all values: small ones of few ranks only. See `first` and `gather_any`.
        """
        values = self.gather_any(value)
        if values is None:
            return []
        return self.broadcast([(i, each) for i, each in enumerate(values) if each is not None])

    def gather_any(self, value: T | None) -> list[T | None] | None:
        """Returns every rank's value or None on rank 0, [] on the others; collective.

        Where no rank has one, it returns None on every rank, and costs one number.
        """
        return (self.gather(value) or []) if self.any(value is not None) else None

    def first(self, value: T | None) -> tuple[int, T] | None:
        """Returns the first rank that has a value, with its value, on every rank; collective.

        None if no rank has one. However many have, each rank receives one value.
        """
        rank_from_end = 0 if value is None else self.size - self.rank
        found = int(self.allreduce_max(np.array([rank_from_end], np.int64))[0])
        if not found:
            return None
        root = self.size - found
        return root, cast("T", self.broadcast(value, root))

    def reduce(self, value: T, combine: Callable[[T, T], T]) -> T | None:
        """Returns the combination of all ranks' values on rank 0, else None; collective.

        Values, which must be picklable, are combined in the order of the ranks, along a tree: each
        rank receives at most log2(P) of them. What combines those of neighbouring ranks must be
        associative.
        """
        step = 1
        while step < self.size:
            if self.rank & step:
                self.send(value, self.rank - step)
                return None
            if self.rank + step < self.size:
                value = combine(value, self.receive(self.rank + step))
            step *= 2
        return value

    def find_different(self, value: Any) -> list[int]:
        """Returns the ranks whose value, a small picklable object, is not rank 0's; collective."""
        is_different = self.broadcast(value) != value
        return [rank for rank, _ in self.collect(True if is_different else None)]

    @abstractmethod
    def send(self, value: Any, rank: int) -> None:
        """Sends a picklable value to one rank, which must `receive` it; returns without waiting.

        A collective call must follow before the end of the process, which is when the value must
        have arrived.
        """

    @abstractmethod
    def receive(self, rank: int) -> Any:
        """Waits for the next value that one rank sends to this one, and returns it."""

    @abstractmethod
    def send_bytes(self, content: memoryview, rank: int) -> Callable[[], None]:
        """Sends bytes, without a copy, to one rank, which must `receive_bytes`; does not wait.

        What it returns waits until the bytes may change: the other rank must receive them for that.
        """

    @abstractmethod
    def receive_bytes(self, into: memoryview, rank: int) -> None:
        """Waits for the next message of one rank, of just as many bytes."""

    @abstractmethod
    def share_between_nodes(self, array: NDArray[Any], bounds: Sequence[tuple[int, int]]) -> None:
        """Completes, in place, an array of which each node holds one range; collective.

        The ranks with local_rank 0 communicate; the others return at once. The array is
        C-contiguous and one-dimensional, with the same shape and dtype on all nodes. The bounds,
        which ascend, are each node's first element and the one after its last.
        """

    @abstractmethod
    def split_nodes(self, part: int) -> Communicator:
        """Returns the same ranks with other nodes: each node is divided into parts; collective.

        The part that this rank is in is a number that no ranks of the node in other parts have.
        """

    def end(self, code: int) -> NoReturn:
        """Ends this process with an exit code that is not 0; collective.

        A launcher ends the job at the first such exit, so all ranks come this far before, and
        rank 0 has printed what it has to say.
        """
        self.barrier()
        _native.remove_shared_memory()
        sys.exit(code)

    @abstractmethod
    def abort(self, code: int) -> NoReturn:
        """Ends all ranks at once, with an exit code; one rank calls it."""


class SerialCommunicator(Communicator):
    """A single process."""

    rank, size = 0, 1
    node, num_nodes = 0, 1
    local_rank, local_size = 0, 1

    def __init__(self) -> None:
        self.local = self
        self._sent: deque[Any] = deque()

    def barrier(self) -> None:
        pass

    def broadcast(self, value: T, root: int = 0) -> T:
        return value

    def allgather(self, value: T) -> list[T]:
        return [value]

    def gather(self, value: T) -> list[T] | None:
        return [value]

    def allreduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.copy()

    def allreduce_max(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.copy()

    def send(self, value: Any, rank: int) -> None:
        self._sent.append(value)

    def receive(self, rank: int) -> Any:
        return self._sent.popleft()

    def send_bytes(self, content: memoryview, rank: int) -> Callable[[], None]:
        """Stores where they are; they may not change before they are received."""
        self._sent.append(content)
        return lambda: None

    def receive_bytes(self, into: memoryview, rank: int) -> None:
        into[:] = self._sent.popleft()

    def share_between_nodes(self, array: NDArray[Any], bounds: Sequence[tuple[int, int]]) -> None:
        pass

    def split_nodes(self, part: int) -> Communicator:
        return self

    def abort(self, code: int) -> NoReturn:
        sys.exit(code)


class MpiCommunicator(Communicator):
    """The ranks that an MPI launcher started, or an ``MPI.Comm`` of some of them on one node.

    Ranks that can share memory are on the same node.
    """

    def __init__(self, ranks: Any = None) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._unfinished: list[Any] = []
        self._ranks = MPI.COMM_WORLD if ranks is None else ranks
        self._awaited = FOR_ALL if ranks is None else FOR_SOME
        self.rank, self.size = self._ranks.rank, self._ranks.size
        if ranks is not None:
            self.node, self.num_nodes = 0, 1
            self.local_rank, self.local_size = self.rank, self.size
            self.local, self._on_node = self, ranks
            return
        local = self._ranks.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        names = local.allgather(os.environ.get(NODE_VARIABLE, ""))
        self._set_nodes(local.Split(color=names.index(names[local.rank]), key=self.rank))

    def _set_nodes(self, local: Any) -> None:
        """Sets what depends on which ranks are on a node: those of an ``MPI.Comm``; collective."""
        self._on_node = local
        self.local_rank, self.local_size = local.rank, local.size
        self.local = MpiCommunicator(local) if local.size > 1 else SerialCommunicator()
        # The first ranks of the nodes number the nodes, so that no rank hears from all others.
        self._leaders = self._ranks.Split(color=min(self.local_rank, 1), key=self.rank)
        self.node, self.num_nodes = local.bcast((self._leaders.rank, self._leaders.size))

    @contextmanager
    def _collective(self, name: str, count_bytes: Callable[[], int]) -> Iterator[None]:
        with waiting(self._awaited), collective("mpi", name, count_bytes):
            yield

    def barrier(self) -> None:
        with self._collective("barrier", lambda: 0):
            self._ranks.Barrier()

    def broadcast(self, value: T, root: int = 0) -> T:
        num_bytes = _num_bytes_of(value if self.rank == root else None)
        with self._collective("broadcast", num_bytes):
            received: T = self._ranks.bcast(value, root)
        return received

    def allgather(self, value: T) -> list[T]:
        with self._collective("allgather", _num_bytes_of(value)):
            return self._ranks.allgather(value)

    def gather(self, value: T) -> list[T] | None:
        with self._collective("gather", _num_bytes_of(value)):
            return self._ranks.gather(value)

    def allreduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        return self._allreduce(array, self._mpi.SUM)

    def allreduce_max(self, array: NDArray[Any]) -> NDArray[Any]:
        return self._allreduce(array, self._mpi.MAX)

    def _allreduce(self, array: NDArray[Any], operation: Any) -> NDArray[Any]:
        result = np.empty_like(array, order="C")
        with self._collective("allreduce", lambda: array.nbytes):
            self._ranks.Allreduce(np.ascontiguousarray(array), result, op=operation)
        return result

    def send(self, value: Any, rank: int) -> None:
        """Sends without waiting; unfinished messages are kept until they have arrived."""
        self._unfinished = [request for request in self._unfinished if not request.test()[0]]
        self._unfinished.append(self._ranks.isend(value, dest=rank))

    def receive(self, rank: int) -> Any:
        with waiting(FOR_SOME), collective("mpi", "receive", lambda: 0):
            return self._ranks.recv(source=rank)

    def send_bytes(self, content: memoryview, rank: int) -> Callable[[], None]:
        request = self._ranks.Isend([content, self._mpi.BYTE], dest=rank)
        self._unfinished.append(request)

        def wait() -> None:
            with waiting(FOR_SOME), collective("mpi", "send", lambda: 0):
                request.wait()

        return wait

    def receive_bytes(self, into: memoryview, rank: int) -> None:
        with waiting(FOR_SOME), collective("mpi", "receive", lambda: 0):
            self._ranks.Recv([into, self._mpi.BYTE], source=rank)

    def share_between_nodes(self, array: NDArray[Any], bounds: Sequence[tuple[int, int]]) -> None:
        if self.num_nodes == 1 or self.local_rank != 0:
            return
        element = self._mpi.BYTE.Create_contiguous(array.itemsize).Commit()
        starts, counts = zip(*((start, stop - start) for start, stop in bounds), strict=True)
        view, mine = array.view(np.uint8), counts[self.node] * array.itemsize
        with waiting(FOR_SOME), collective("mpi", "allgather in place", lambda: mine):
            self._leaders.Allgatherv(self._mpi.IN_PLACE, [view, counts, starts, element])
        element.Free()

    def split_nodes(self, part: int) -> Communicator:
        divided = copy.copy(self)
        divided._unfinished = []
        divided._set_nodes(self._on_node.Split(color=part, key=self.rank))
        return divided

    def abort(self, code: int) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            # With an error of a terminal that has gone with its launcher, this process would end
            # as usual, and JAX then wait for the other ranks.
            with suppress(OSError):
                stream.flush()
        _native.remove_shared_memory()
        self._ranks.Abort(code)
        raise AssertionError("MPI_Abort returned")


def _num_bytes_of(value: Any) -> Callable[[], int]:
    """Returns a function that returns the size of a pickled value."""
    return lambda: len(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def prepare_start(rank: LaunchedRank, environ: MutableMapping[str, str]) -> None:
    """Tells Open MPI before it starts what ranks do without.

    UCX, which it loads, would enter its debug mode with SIGHUP, and so let a rank survive it. Ranks
    of one node exchange messages through memory, without libfabric, whose search for network cards
    takes Open MPI 5 a second. What the user has chosen, by these variables or by an option of
    mpirun, holds. Other libraries take no notice.
    """
    environ.setdefault("UCX_DEBUG_SIGNO", "0")
    if rank.size is not None and rank.size == rank.local_size:
        environ.setdefault("OMPI_MCA_btl", "^ofi")


@cache
def connect() -> Communicator:
    """Returns the communicator of this job; collective at the first call, later the same object.

    A single process, with or without a launcher, gets a serial one, which needs neither MPI nor
    Horovod.

    Raises:
        SetupError: A launcher started this process, and mpi4py or its MPI library is missing.
    """
    launcher = launcher_variable()
    if launcher is None:
        return SerialCommunicator()
    begin = time.perf_counter()
    prepare_start(launched_rank(), os.environ)
    # MPI holds Python's lock while it waits for the other ranks, of which one may be missing.
    agent.guard_launcher(limits_from_environment().stopped_s, terminal())
    if launched_rank().local_rank == 0:
        agent.remove_leftovers()
    try:
        mpi: Communicator = MpiCommunicator()
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library that it can load
        agent.end_guard()
        if launched_rank().size == 1:
            return SerialCommunicator()
        raise SetupError(
            f"an MPI launcher started this process ({launcher} is set), but mpi4py cannot be used:"
            f" {error}. Install candle-p1[cpu] or candle-p1[gpu], or start a single process without"
            " the launcher"
        ) from error
    start_s = time.perf_counter() - begin
    if mpi.size == 1:
        agent.end_guard()
        mpi = SerialCommunicator()
    mpi.start_s = start_s
    return mpi


def check_ranks(layout: LaunchedRank, comm: Communicator) -> None:
    """Raises SetupError unless MPI knows the ranks that the launcher started; collective.

    Usually, each process then believes that it is the only one.
    """
    of = "" if layout.size is None else f" of {layout.size}"
    message = (
        f"node {layout.node}: {layout.launcher} started this process as rank {layout.rank}{of}"
        f" ({layout.seen}), but for MPI it is rank {comm.rank} of {comm.size}: the launcher has"
        " ended, or does not belong to the MPI library. Use the launcher of this MPI (not"
        " horovodrun), choose another interface (srun --mpi=pmix; srun --mpi=list shows the"
        " available ones), or rebuild against the machine's MPI: make setup MPI=system. A process"
        f" that is to run alone needs {SINGLE_PROCESS_VARIABLE}=1"
    )
    is_wrong = layout.size not in (None, comm.size) or layout.rank != comm.rank
    if found := comm.first(message if is_wrong else None):
        error = SetupError(found[1])
        if comm.size > 1:
            raise error.on_all_ranks()
        error.printed = layout.rank > 0 and layout.size is not None  # each finds this; one says it
        raise error


def _outcome(work: Callable[[], T]) -> tuple[T | None, CandleError | None]:
    """Returns the result of a rank's own work, or the error with which it failed."""
    try:
        return work(), None
    except CandleError as error:
        return None, error


def attempt(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
    """Does a rank's own work, without communication, and returns what `agree` may call later.

    That returns the result, or raises the CandleError with which the work has failed.
    """
    result, error = _outcome(partial(work, *args, **kwargs))

    def finish() -> T:
        if error is not None:
            raise error
        return cast("T", result)

    return finish


def agree(comm: Communicator, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Does work that needs no other rank, and returns its result if no rank fails; collective.

    Raises:
        CandleError: The work failed on some rank. If all ranks had the same error, it is that
            error, else one that names the ranks; the same on every rank, and marked `agreed`.
    """
    result, error = _outcome(partial(work, *args, **kwargs))
    errors = comm.gather_any(error)
    if errors is None:
        return cast("T", result)
    # Rank 0 makes one error of them, so that the others receive no more than that.
    raise comm.broadcast(_combined(errors)).on_all_ranks()


def _combined(errors: Sequence[CandleError | None]) -> CandleError:
    """Returns one error for those of some ranks, or the error that all of them have."""
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if failed and len(failed) == len(errors) and len({str(error) for _, error in failed}) == 1:
        return failed[0][1]
    return DistributedError(
        "; ".join(f"rank {rank}: {error}" for rank, error in failed[:4])
        + (f"; and {len(failed) - 4} more" if len(failed) > 4 else "")
    )


def on_first_rank(comm: Communicator, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Does work on rank 0 only, and returns its picklable result on all ranks; collective.

    A CandleError of rank 0 is raised on every rank.
    """
    outcome = _outcome(partial(work, *args, **kwargs)) if comm.rank == 0 else (None, None)
    result, error = comm.broadcast(outcome)
    if error is not None:
        raise error.on_all_ranks()
    return cast("T", result)
