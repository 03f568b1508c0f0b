"""Operations between ranks, and what a transport has to do so that they can be timed.

Sizes and bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there): the size of an
allgather or a reduce-scatter is that of the whole array, of which each rank has one part. The
algorithm bandwidth is this size divided by the time. The bus bandwidth is the algorithm bandwidth
times a factor of the operation and the number of ranks, with which it becomes the rate of the
slowest link of a ring, whatever the number of ranks. OSU's benchmarks name the same times by
the size of one rank's part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from candle_p1.distributed.comm import Communicator

    Floats = NDArray[np.float32]

ALLREDUCE, ALLREDUCE_OF_16 = "allreduce", "allreduce_of_16"
BROADCAST, ALLGATHER, REDUCE_SCATTER = "broadcast", "allgather", "reduce_scatter"
POINT_TO_POINT, ON_NODE, STREAM = "point_to_point", "point_to_point_on_node", "stream"
NUM_TENSORS = 16
"""The number of tensors of an ALLREDUCE_OF_16, which are handed over at once as the gradients of a
step are: fusion and cycle time make a difference only where there are several."""
ELEMENT_BYTES = 4
"""Gradients are float32."""
PERIOD = 251
"""Arrays repeat after so many elements; a prime, so that no block of an algorithm divides it."""
CHUNK = 1 << 16
"""Arrays are filled and compared in parts of so many elements, which stay in the cache."""
TOLERANCE = 1e-5
"""What is received may differ from what is expected by this share of it, for rounding."""
PRODUCT_SIZE = 128
"""The edge of the matrices whose products are computed at the same time."""
SMALL_SIZE = 32
"""That of matrices whose products stay in one thread."""


class Operation(NamedTuple):
    """An operation.

    Attributes:
        title: Its name.
        explanation: What it is, where the name does not say it.
        bus_factor: The bus bandwidth divided by the algorithm bandwidth, for a number of ranks.
        least: The least number of elements of an array, for a number of ranks; all others are its
            multiples where the array has a part for each rank.
        is_divided: Whether it has.
    """

    title: str
    bus_factor: Callable[[int], float]
    least: Callable[[int], int] = lambda num_ranks: 1
    explanation: str = ""
    is_divided: bool = False

    def num_elements(self, num_bytes: int, num_ranks: int) -> int:
        """Returns how many elements an array of about so many bytes has."""
        least = self.least(num_ranks)
        num = max(least, -(-num_bytes // ELEMENT_BYTES))
        return -(-num // least) * least if self.is_divided else num


OPERATIONS = {
    ALLREDUCE: Operation("allreduce", lambda n: 2 * (n - 1) / n),
    ALLREDUCE_OF_16: Operation(
        f"allreduce of {NUM_TENSORS} tensors",
        lambda n: 2 * (n - 1) / n,
        lambda n: NUM_TENSORS,
        "together they have this size",
    ),
    BROADCAST: Operation("broadcast", lambda n: 1.0),
    ALLGATHER: Operation("allgather", lambda n: (n - 1) / n, lambda n: n, is_divided=True),
    REDUCE_SCATTER: Operation(
        "reduce-scatter", lambda n: (n - 1) / n, lambda n: n, is_divided=True
    ),
    POINT_TO_POINT: Operation(
        "point to point",
        lambda n: 1.0,
        explanation="half of a round trip between the first and the last rank",
    ),
    ON_NODE: Operation(
        "point to point on a node",
        lambda n: 1.0,
        explanation="half of a round trip between two ranks of a node",
    ),
    STREAM: Operation(
        "stream of messages",
        lambda n: 1.0,
        explanation="from the first to the last rank; times are per message",
    ),
}
"""The operations by name, in the order in which they are measured."""


@dataclass(frozen=True)
class Call:
    """An operation on an array, ready to be timed; all ranks call it the same number of times.

    Attributes:
        run: Does it once, and returns when this rank's part is complete.
        received: Returns what this rank has received; None: nothing.
        source: The rank whose array is received, where it is that of one rank.
        num_messages: The number of messages that follow each other in it.
        is_timed: Whether this rank's times count; between two ranks those of the first one do, as
            with OSU's benchmarks.
    """

    run: Callable[[], Any]
    received: Callable[[], NDArray[Any] | None]
    source: int = 0
    num_messages: int = 1
    is_timed: bool = True


@dataclass(frozen=True)
class Overlap:
    """An allreduce beside computing, ready to be timed.

    Attributes:
        compute: Computes so many products of matrices, one after the other.
        together: Does the same, and an allreduce that begins before it and may go on meanwhile.
    """

    compute: Callable[[int], Any]
    together: Callable[[int], Any]


class Transport(ABC):
    """A library that transfers arrays between ranks. All ranks must call its methods.

    Args:
        comm: The ranks, at least two.
    """

    operations: Sequence[str]
    """The names of those that it offers, as far as training uses it for them."""
    averages = False
    """Whether an allreduce returns the mean and not the sum, as gradients are averaged."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    @abstractmethod
    def start(self) -> dict[str, Any]:
        """Starts it; returns its settings and version.

        Raises:
            CandleError: It cannot be started; the same on every rank.
        """

    def stop(self) -> None:  # noqa: B027
        """Stops it, so that another one is measured alone."""

    @abstractmethod
    def prepare(self, operation: str, values: Floats) -> Call:
        """Returns a call of an operation.

        Args:
            operation: One of `operations`.
            values: This rank's array: for ALLGATHER, its part.
        """

    @abstractmethod
    def overlap(self, values: Floats) -> Overlap:
        """Returns an allreduce of an array beside computing."""


def given(operation: str, rank: int, num_ranks: int, num_elements: int) -> Floats:
    """Returns the array that a rank contributes: integers, whose sums are exact.

    Args:
        operation: The operation.
        rank: The rank.
        num_ranks: The number of ranks.
        num_elements: The elements of the whole array; see Operation.num_elements.
    """
    if operation == ALLGATHER:
        num_elements //= num_ranks
    values = np.empty(num_elements, np.float32)
    for begin in range(0, num_elements, CHUNK):
        end = min(begin + CHUNK, num_elements)
        values[begin:end] = _values(rank, begin, end)
    return values


def is_expected(
    received: NDArray[Any],
    operation: str,
    rank: int,
    num_ranks: int,
    num_elements: int,
    *,
    source: int = 0,
    averages: bool = False,
) -> bool:
    """Returns whether a rank has received what follows from `given`, to rounding.

    Args:
        received: What it has received.
        operation: The operation.
        rank: The rank.
        num_ranks: The number of ranks.
        num_elements: The elements of the whole array.
        source: See Call.
        averages: Whether the transport averages in an allreduce.
    """
    part = num_elements // num_ranks
    if received.shape != (part if operation == REDUCE_SCATTER else num_elements,):
        return False
    # The element of `given` at which each range of what was received begins, and its rank.
    ranges = [(0, source)]
    if operation == ALLGATHER:
        ranges = [(0, each) for each in range(num_ranks)]
    elif operation == REDUCE_SCATTER:
        ranges = [(rank * part, 0)]
    length = len(received) // len(ranges)
    factor, others = 1, 0
    if operation in (ALLREDUCE, ALLREDUCE_OF_16, REDUCE_SCATTER):
        factor, others = num_ranks, sum(each % PERIOD for each in range(num_ranks))
    divisor = num_ranks if averages and operation in (ALLREDUCE, ALLREDUCE_OF_16) else 1
    for number, (first, of_rank) in enumerate(ranges):
        for begin in range(0, length, CHUNK):
            end = min(begin + CHUNK, length)
            wanted = (_values(of_rank, first + begin, first + end) * factor + others) / divisor
            differences = np.abs(received[number * length :][begin:end] - wanted)
            if not np.all(differences <= TOLERANCE * wanted):  # nor is NaN
                return False
    return True


def _values(rank: int, begin: int, end: int) -> Floats:
    """Returns a range of at most CHUNK of the elements that a rank contributes."""
    first = begin % PERIOD
    values: Floats = _periods()[first : first + end - begin] + np.float32(rank % PERIOD)
    return values


@cache
def _periods() -> Floats:
    """Returns 0 to PERIOD - 1 again and again: CHUNK elements from any place of the first."""
    return np.resize(np.arange(PERIOD, dtype=np.float32), CHUNK + PERIOD)


def places(comm: Communicator) -> Mapping[str, tuple[int, int]]:
    """Returns the two ranks of each operation from point to point; collective.

    There is ON_NODE only if there are several nodes, one of which has several ranks.
    """
    found = {POINT_TO_POINT: (0, comm.size - 1), STREAM: (0, comm.size - 1)}
    if comm.num_nodes > 1:
        seconds = comm.first(comm.rank if comm.local_rank == 1 else None)
        firsts = comm.collect(comm.node if comm.local_rank == 0 else None)
        if seconds:
            node = comm.broadcast(comm.node, seconds[0])
            first = next(rank for rank, of_node in firsts if of_node == node)
            found[ON_NODE] = (first, seconds[0])
    return found


def multiplier() -> Callable[[int], None]:
    """Returns a function that computes so many products of matrices in this thread, with numpy.

    Each has the operations of one of PRODUCT_SIZE, but is a stack of products so small that no
    library of linear algebra divides them among threads.
    """
    num, size = (PRODUCT_SIZE // SMALL_SIZE) ** 3, SMALL_SIZE
    left = np.ones((num, size, size), np.float32)
    mean, into = np.full((size, size), 1 / size, np.float32), np.empty_like(left)

    def compute(num_products: int) -> None:
        for _ in range(num_products):
            np.matmul(left, mean, out=into)

    return compute
