"""A job of thousands of ranks in one process, which counts the messages and bytes of every rank.

Ranks are threads that take turns, so nothing is measured but what each rank sends and receives: how
that grows with the number of ranks holds on any machine. What a collective costs follows from the
algorithms that MPI libraries use (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1), 2005): trees and recursive doubling take log2(P)
messages; a gather brings every rank's value to the root.
"""

from __future__ import annotations

import math
import pickle
import sys
import threading
from collections import defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from candle_p1.distributed.comm import Communicator, SerialCommunicator
from candle_p1.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import NoReturn

    from numpy.typing import NDArray

T = TypeVar("T")
STACK_BYTES = 512 * 1024
"""Of each rank's thread; thousands of usual ones would reserve tens of gigabytes."""
_INT_BYTES = 8
SWITCH_S = 1.0
PATIENCE_S = 10.0
"""How long a rank may take to end, once the job cannot go on."""
"""How long a rank may go on before Python has it give way to others. They give way by themselves
when they wait for each other, and thousands that ask for their turn would take most of the time."""
WHOLE_RUN = ""
"""The phase of what happens outside all phases."""


@dataclass
class Traffic:
    """What a rank received in a phase.

    Attributes:
        num_messages: The messages.
        num_bytes: Their bytes, without those of headers.
    """

    num_messages: int = 0
    num_bytes: int = 0

    def add(self, num_messages: int, num_bytes: int) -> None:
        """Adds messages."""
        self.num_messages += num_messages
        self.num_bytes += num_bytes


class SimulatedJob:
    """A job whose ranks are threads of this process.

    Args:
        num_ranks: The number of ranks, P.
        ranks_per_node: The number of ranks on each node; the last node may have fewer.

    Attributes:
        traffic: What each rank received, by phase.
    """

    def __init__(self, num_ranks: int, ranks_per_node: int = 1) -> None:
        self.num_ranks, self.ranks_per_node = num_ranks, ranks_per_node
        self.traffic: list[dict[str, Traffic]] = [defaultdict(Traffic) for _ in range(num_ranks)]
        self._phases = [WHOLE_RUN] * num_ranks
        self._mail: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._letters = [threading.Condition(self._lock) for _ in range(num_ranks)]
        self._groups: list[_Group] = []
        self._broken: BaseException | None = None

    def run(self, work: Callable[[SimulatedCommunicator], T]) -> list[T]:
        """Returns what `work` returns on each rank; it is called with the rank's communicator.

        Raises:
            BaseException: What the first rank to fail raised; the other ranks are ended.
        """
        every = _Group(self, range(self.num_ranks))
        nodes = [
            _Group(self, range(first, min(first + self.ranks_per_node, self.num_ranks)))
            for first in range(0, self.num_ranks, self.ranks_per_node)
        ]
        self._groups = [every, *nodes]
        results: list[Any] = [None] * self.num_ranks

        def execute(rank: int) -> None:
            node = rank // self.ranks_per_node
            try:
                results[rank] = work(SimulatedCommunicator(self, every, rank, nodes, node))
            except _Ended:
                pass
            except BaseException as error:
                self._break(error)

        before, switch_s = threading.stack_size(STACK_BYTES), sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            ranks = [
                threading.Thread(target=execute, args=[rank], daemon=True)
                for rank in range(self.num_ranks)
            ]
            try:
                for thread in ranks:
                    thread.start()
                threading.stack_size(before)
                for thread in ranks:
                    thread.join()
            except BaseException as error:  # not enough threads, or Ctrl-C
                self._break(error)
                for thread in ranks:
                    if thread.ident is not None:
                        thread.join(PATIENCE_S)
                raise
        finally:
            threading.stack_size(before)
            sys.setswitchinterval(switch_s)
        if self._broken is not None:
            raise self._broken
        return results

    def _break(self, error: BaseException) -> None:
        """Ends all ranks; those that wait end at once."""
        with self._lock:
            self._broken = self._broken or error
            for waiting in (*self._letters, *(group.complete for group in self._groups)):
                waiting.notify_all()

    @contextmanager
    def phase(self, name: str, rank: int) -> Iterator[None]:
        """Counts what a rank receives in the body of ``with`` under a name of its own."""
        before, self._phases[rank] = self._phases[rank], name
        try:
            yield
        finally:
            self._phases[rank] = before

    def received(self, phase: str) -> list[Traffic]:
        """Returns what each rank received in a phase."""
        return [phases.get(phase, Traffic()) for phases in self.traffic]

    def count(self, rank: int, num_messages: int, num_bytes: int) -> None:
        """Adds messages that a rank has received."""
        self.traffic[rank][self._phases[rank]].add(num_messages, num_bytes)

    def wait_until(self, condition: threading.Condition, is_true: Callable[[], bool]) -> None:
        """Waits, in the thread of a rank that holds the condition."""
        condition.wait_for(lambda: self._broken is not None or is_true())
        if self._broken is not None:
            raise _Ended

    def new_condition(self) -> threading.Condition:
        """Returns a condition for what ranks share."""
        return threading.Condition(self._lock)

    def new_groups(self, members: Iterable[Sequence[int]]) -> list[_Group]:
        """Returns further groups of ranks; called by a rank that holds a condition."""
        groups = [_Group(self, ranks) for ranks in members]
        self._groups += groups
        return groups

    def put(self, sender: int, receiver: int, value: Any) -> None:
        """Leaves a value for a rank."""
        with self._letters[receiver]:
            self._mail[sender, receiver].append(value)
            self._letters[receiver].notify_all()

    def take(self, sender: int, receiver: int) -> Any:
        """Waits for a value from a rank."""
        with self._letters[receiver]:
            mail = self._mail[sender, receiver]
            self.wait_until(self._letters[receiver], lambda: bool(mail))
            return mail.popleft()


class _Ended(BaseException):
    """Another rank has failed."""


class _Call(NamedTuple):
    """What a rank contributes to a collective operation."""

    name: str
    value: Any
    num_bytes: int


class _Group:
    """Ranks that take part in collective operations together."""

    def __init__(self, job: SimulatedJob, ranks: Sequence[int]) -> None:
        self.job, self.ranks = job, ranks
        self.complete = job.new_condition()
        self._calls: dict[int, _Call] = {}
        self._result: Any = None
        self._num_done = 0

    def meet(self, rank: int, call: _Call, combine: Callable[[list[_Call]], Any]) -> Any:
        """Returns what `combine` makes, once, of what all ranks contribute.

        Args:
            rank: The rank within the group.
            call: What it contributes.
            combine: Gets the contributions in the order of the ranks.

        Raises:
            DistributedError: The ranks call different operations.
        """
        with self.complete:
            number = self._num_done
            self._calls[rank] = call
            if len(self._calls) < len(self.ranks):
                self.job.wait_until(self.complete, lambda: self._num_done != number)
            else:
                calls = [self._calls[each] for each in range(len(self.ranks))]
                self._calls = {}
                if len({each.name for each in calls}) > 1:
                    raise DistributedError(
                        "ranks called different collectives: "
                        + ", ".join(f"rank {i} {each.name}" for i, each in enumerate(calls[:8]))
                    )
                self._result = combine(calls)
                self._num_done += 1
                self.complete.notify_all()
            return self._result


class SimulatedCommunicator(Communicator):
    """The communicator of one rank of a `SimulatedJob`.

    Attributes:
        job: The job.
    """

    def __init__(
        self, job: SimulatedJob, group: _Group, rank: int, nodes: Sequence[_Group], node: int
    ) -> None:
        self.job, self._group = job, group
        self._world_rank = group.ranks[rank]
        self.rank, self.size = rank, len(group.ranks)
        self.node, self.num_nodes = node, len(nodes)
        own = nodes[node]
        self.local_size = len(own.ranks)
        self.local_rank = own.ranks.index(self._world_rank)
        if own is group:
            self.local = self
        elif self.local_size == 1:
            self.local = SerialCommunicator()
        else:
            self.local = SimulatedCommunicator(job, own, self.local_rank, [own], 0)

    def _meet(
        self,
        name: str,
        value: Any,
        num_bytes: int,
        combine: Callable[[list[_Call]], Any] = lambda calls: calls,
    ) -> Any:
        return self._group.meet(self.rank, _Call(name, value, num_bytes), combine)

    def _count(self, num_messages: int, num_bytes: int) -> None:
        self.job.count(self._world_rank, num_messages, num_bytes)

    @property
    def _depth(self) -> int:
        return math.ceil(math.log2(self.size))

    def barrier(self) -> None:
        """Counts log2(P) empty messages."""
        self._meet("barrier", None, 0)
        self._count(self._depth, 0)

    def broadcast(self, value: T, root: int = 0) -> T:
        """Counts one message, except on the root."""
        mine = _pickled(value) if self.rank == root else b""
        sent = self._meet(f"broadcast from {root}", mine, len(mine), lambda calls: calls[root])
        if self.rank == root:
            return value
        self._count(1, sent.num_bytes)
        return pickle.loads(sent.value)  # type: ignore[no-any-return]

    def allgather(self, value: T) -> list[T]:
        """Counts log2(P) messages with the values of all other ranks."""
        mine = _pickled(value)
        everyone = self._meet("allgather", mine, len(mine))
        self._count(self._depth, sum(each.num_bytes for each in everyone) - len(mine))
        return [pickle.loads(each.value) for each in everyone]

    def gather(self, value: T) -> list[T] | None:
        """Counts, on rank 0, a message from each other rank."""
        mine = _pickled(value)
        everyone = self._meet("gather", mine, len(mine))
        if self.rank:
            return None
        self._count(self.size - 1, sum(each.num_bytes for each in everyone) - len(mine))
        return [pickle.loads(each.value) for each in everyone]

    def allreduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """Counts log2(P) messages of the array's size."""
        return self._allreduce("sum", array, np.sum)

    def allreduce_max(self, array: NDArray[Any]) -> NDArray[Any]:
        """Counts log2(P) messages of the array's size."""
        return self._allreduce("max", array, np.max)

    def _allreduce(
        self, name: str, array: NDArray[Any], operation: Callable[..., Any]
    ) -> NDArray[Any]:
        def combine(calls: list[_Call]) -> Any:
            return operation([each.value for each in calls], axis=0)

        result = self._meet(f"allreduce {name}", array, array.nbytes, combine)
        self._count(self._depth, self._depth * array.nbytes)
        return np.array(result, array.dtype)

    def send(self, value: Any, rank: int) -> None:
        """Leaves the value with the other rank."""
        self.job.put(self._world_rank, self._group.ranks[rank], _pickled(value))

    def receive(self, rank: int) -> Any:
        """Counts one message."""
        value = self.job.take(self._group.ranks[rank], self._world_rank)
        self._count(1, len(value))
        return pickle.loads(value)

    def send_bytes(self, content: memoryview, rank: int) -> Callable[[], None]:
        """Leaves a copy with the other rank."""
        self.send(bytes(content), rank)
        return lambda: None

    def receive_bytes(self, into: memoryview, rank: int) -> None:
        """Counts one message."""
        into[:] = self.receive(rank)

    def share_between_nodes(self, array: NDArray[Any], bounds: Sequence[tuple[int, int]]) -> None:
        """Counts, on the first rank of each node, log2(nodes) messages with all other ranges."""
        if self.num_nodes == 1:
            return
        start, stop = bounds[self.node]
        mine = array[start:stop].copy() if self.local_rank == 0 else None
        everyone = self._meet("share between nodes", (self.node, mine), 0)
        if mine is None:
            return
        others = [each.value for each in everyone if each.value[0] != self.node]
        others = [(node, values) for node, values in others if values is not None]
        for node, values in others:
            array[slice(*bounds[node])] = values
        self._count(math.ceil(math.log2(self.num_nodes)), sum(part.nbytes for _, part in others))

    def split_nodes(self, part: int) -> Communicator:
        """Counts log2(P) messages with the parts of all ranks."""

        def divide(calls: list[_Call]) -> list[_Group]:
            members: dict[tuple[int, int], list[int]] = defaultdict(list)
            for rank, call in zip(self._group.ranks, calls, strict=True):
                members[call.value].append(rank)
            return self.job.new_groups(members.values())

        nodes = self._meet("split nodes", (self.node, part), _INT_BYTES, divide)
        self._count(self._depth, (self.size - 1) * _INT_BYTES)
        node = next(i for i, each in enumerate(nodes) if self._world_rank in each.ranks)
        return SimulatedCommunicator(self.job, self._group, self.rank, nodes, node)

    def abort(self, code: int) -> NoReturn:
        """Ends all ranks."""
        raise SystemExit(code)


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
