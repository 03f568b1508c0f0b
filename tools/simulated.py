"""A job of thousands of ranks in one process, which counts the messages and bytes of every rank.

Ranks are threads that take turns, so nothing is measured but what each rank receives: how that
grows with the number of ranks holds on any machine. What a collective costs follows from the
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from candle_p1.distributed.comm import Communicator, SerialCommunicator
from candle_p1.errors import DistributedError

T = TypeVar("T")
STACK_BYTES = 512 * 1024
"""Of each rank's thread; thousands of usual ones would reserve tens of gigabytes."""
SWITCH_S = 1.0
"""How long a rank may go on before Python has it give way to others. They give way by themselves
when they wait for each other, and thousands that ask for their turn would take most of the time."""
WHOLE_RUN = ""
"""The phase of what happens outside all phases."""
INT_BYTES = 8


class ArrayInMemory:
    """A NumPy array as a source of checkpoints; see candle_p1.checkpoints.shards."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.shape, self.dtype, self._array = array.shape, array.dtype, array

    def copy_into(self, rows: slice, out: NDArray[Any]) -> None:
        """Copies some rows."""
        np.copyto(out, self._array[rows] if self._array.ndim else self._array)


class SimulatedJob:
    """A job whose ranks are threads of this process.

    Args:
        num_ranks: The number of ranks, P.
        ranks_per_node: The number of ranks on each node; the last node may have fewer.

    Attributes:
        traffic: By phase, the messages that each rank received and their bytes without those of
            headers, shape (num_ranks, 2).
    """

    def __init__(self, num_ranks: int, ranks_per_node: int = 1) -> None:
        self.num_ranks, self.ranks_per_node = num_ranks, ranks_per_node
        self.mail: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.traffic = {WHOLE_RUN: np.zeros((num_ranks, 2), int)}
        self._phases = [WHOLE_RUN] * num_ranks
        self._lock = threading.Lock()
        self._conditions: list[threading.Condition] = []
        self._broken: BaseException | None = None
        self.letters = [self.new_condition() for _ in range(num_ranks)]

    def run(self, work: Callable[[SimulatedCommunicator], T]) -> list[T]:
        """Returns what `work` returns on each rank; it is called with the rank's communicator.

        Raises:
            BaseException: What the first rank to fail raised; the other ranks are ended.
        """
        everyone = range(self.num_ranks)
        world = Group(self, everyone)
        nodes = [
            Group(self, everyone[first : first + self.ranks_per_node])
            for first in range(0, self.num_ranks, self.ranks_per_node)
        ]
        results: list[Any] = [None] * self.num_ranks

        def execute(rank: int) -> None:
            node = rank // self.ranks_per_node
            try:
                results[rank] = work(SimulatedCommunicator(world, rank, nodes, node))
            except _Ended:
                pass
            except BaseException as error:
                self._break(error)

        ranks = [threading.Thread(target=execute, args=[rank], daemon=True) for rank in everyone]
        before, switch_s = threading.stack_size(STACK_BYTES), sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            for thread in ranks:
                thread.start()
            threading.stack_size(before)
            for thread in ranks:
                thread.join()
        finally:
            threading.stack_size(before)
            sys.setswitchinterval(switch_s)
        if self._broken is not None:
            raise self._broken
        return results

    def _break(self, error: BaseException) -> None:
        with self._lock:
            self._broken = self._broken or error
            for waiting in self._conditions:
                waiting.notify_all()

    @contextmanager
    def phase(self, name: str, rank: int) -> Iterator[None]:
        """Counts what a rank receives in the body of ``with`` under a name of its own."""
        if name not in self.traffic:
            self.traffic.setdefault(name, np.zeros((self.num_ranks, 2), int))
        before, self._phases[rank] = self._phases[rank], name
        try:
            yield
        finally:
            self._phases[rank] = before

    def count(self, rank: int, num_messages: int, num_bytes: int) -> None:
        """Adds messages that a rank has received."""
        self.traffic[self._phases[rank]][rank] += num_messages, num_bytes

    def new_condition(self) -> threading.Condition:
        """Returns a condition on which ranks wait, until the job cannot go on."""
        self._conditions.append(threading.Condition(self._lock))
        return self._conditions[-1]

    def wait_until(self, condition: threading.Condition, is_true: Callable[[], bool]) -> None:
        """Waits, in the thread of a rank that holds the condition."""
        condition.wait_for(lambda: self._broken is not None or is_true())
        if self._broken is not None:
            raise _Ended


class _Ended(BaseException):
    """Another rank has failed."""


class Group:
    """Ranks that take part in collective operations together."""

    def __init__(self, job: SimulatedJob, ranks: Sequence[int]) -> None:
        self.job, self.ranks = job, ranks
        self._complete = job.new_condition()
        self._calls: dict[int, tuple[str, Any]] = {}
        self._result: Any = None
        self._num_done = 0

    def meet(self, rank: int, name: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Returns what `combine` makes, once, of the values of all ranks in their order.

        Raises:
            DistributedError: The ranks call different operations.
        """
        with self._complete:
            number = self._num_done
            self._calls[rank] = name, value
            if len(self._calls) < len(self.ranks):
                self.job.wait_until(self._complete, lambda: self._num_done != number)
            else:
                calls = [self._calls[each] for each in range(len(self.ranks))]
                self._calls = {}
                if len({each for each, _ in calls}) > 1:
                    raise DistributedError(
                        "ranks called different collectives: "
                        + ", ".join(f"rank {i} {each}" for i, (each, _) in enumerate(calls[:8]))
                    )
                self._result = combine([each for _, each in calls])
                self._num_done += 1
                self._complete.notify_all()
            return self._result


class SimulatedCommunicator(Communicator):
    """The communicator of one rank of a `SimulatedJob`; its methods say what they count."""

    def __init__(self, group: Group, rank: int, nodes: Sequence[Group], node: int) -> None:
        self.job, self._group = group.job, group
        self._world_rank = group.ranks[rank]
        self.rank, self.size = rank, len(group.ranks)
        self.node, self.num_nodes = node, len(nodes)
        self._depth = math.ceil(math.log2(self.size))
        own = nodes[node]
        self.local_size = len(own.ranks)
        self.local_rank = own.ranks.index(self._world_rank)
        if own is group:
            self.local = self
        elif self.local_size == 1:
            self.local = SerialCommunicator()
        else:
            self.local = SimulatedCommunicator(own, self.local_rank, [own], 0)

    def _meet(self, name: str, value: Any, combine: Callable[[list[Any]], Any] = list) -> Any:
        return self._group.meet(self.rank, name, value, combine)

    def _count(self, num_messages: int, num_bytes: int) -> None:
        self.job.count(self._world_rank, num_messages, num_bytes)

    def barrier(self) -> None:
        """Counts log2(P) empty messages."""
        self._meet("barrier", None)
        self._count(self._depth, 0)

    def broadcast(self, value: T, root: int = 0) -> T:
        """Counts one message, except on the root."""
        mine = _pickled(value) if self.rank == root else b""
        sent = self._meet(f"broadcast from {root}", mine, lambda values: values[root])
        if self.rank == root:
            return value
        self._count(1, len(sent))
        return pickle.loads(sent)  # type: ignore[no-any-return]

    def allgather(self, value: T) -> list[T]:
        """Counts log2(P) messages with the values of all other ranks."""
        return self._received(self._meet("allgather", _pickled(value)), self._depth)

    def gather(self, value: T) -> list[T] | None:
        """Counts, on rank 0, a message from each other rank."""
        everyone = self._meet("gather", _pickled(value))
        return None if self.rank else self._received(everyone, self.size - 1)

    def _received(self, everyone: list[bytes], num_messages: int) -> list[Any]:
        self._count(num_messages, sum(map(len, everyone)) - len(everyone[self.rank]))
        return [pickle.loads(each) for each in everyone]

    def allreduce_sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """Counts log2(P) messages of the array's size."""
        return self._allreduce("sum", array, np.sum)

    def allreduce_max(self, array: NDArray[Any]) -> NDArray[Any]:
        """Counts log2(P) messages of the array's size."""
        return self._allreduce("max", array, np.max)

    def _allreduce(
        self, name: str, array: NDArray[Any], operation: Callable[..., Any]
    ) -> NDArray[Any]:
        result = self._meet(f"allreduce {name}", array, lambda values: operation(values, axis=0))
        self._count(self._depth, self._depth * array.nbytes)
        return np.array(result, array.dtype)

    def send(self, value: Any, rank: int) -> None:
        """Leaves the value with the other rank."""
        receiver = self._group.ranks[rank]
        with self.job.letters[receiver]:
            self.job.mail[self._world_rank, receiver].append(_pickled(value))
            self.job.letters[receiver].notify_all()

    def receive(self, rank: int) -> Any:
        """Counts one message."""
        letters = self.job.letters[self._world_rank]
        with letters:
            mail = self.job.mail[self._group.ranks[rank], self._world_rank]
            self.job.wait_until(letters, lambda: bool(mail))
            value = mail.popleft()
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
        mine = array[slice(*bounds[self.node])].copy() if self.local_rank == 0 else None
        everyone = self._meet("share between nodes", (self.node, mine))
        if mine is None:
            return
        others = [(node, each) for node, each in everyone if each is not None and node != self.node]
        for node, values in others:
            array[slice(*bounds[node])] = values
        self._count(math.ceil(math.log2(self.num_nodes)), sum(part.nbytes for _, part in others))

    def split_nodes(self, part: int) -> Communicator:
        """Counts log2(P) messages with the parts of all ranks."""

        def divide(parts: list[Any]) -> list[Group]:
            members: dict[Any, list[int]] = defaultdict(list)
            for rank, each in zip(self._group.ranks, parts, strict=True):
                members[each].append(rank)
            return [Group(self.job, ranks) for ranks in members.values()]

        nodes = self._meet("split nodes", (self.node, part), divide)
        self._count(self._depth, (self.size - 1) * INT_BYTES)
        node = next(i for i, each in enumerate(nodes) if self._world_rank in each.ranks)
        return SimulatedCommunicator(self._group, self.rank, nodes, node)

    def abort(self, code: int) -> NoReturn:
        """Ends all ranks."""
        raise SystemExit(code)


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
