"""Transports: the libraries through which ranks exchange arrays, and which arrays, to be timed.

Sizes and bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there): the size of an
allgather or a reduce-scatter is that of the whole array, of which each rank has one part. The
algorithm bandwidth is this size divided by the time. The bus bandwidth is the algorithm bandwidth
times a factor of the operation and the number of ranks, with which it becomes the rate of the
slowest link of a ring, whatever the number of ranks. OSU's benchmarks name the same times by
the size of one rank's part.

A transport is a class in candle_p1.bench.transport_libraries, and one entry of TRANSPORTS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.bench.harness import choose_names
from candle_p1.distributed.comm import Communicator
from candle_p1.errors import ParameterError

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
FUSION, CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"
"""Horovod's variables, in bytes and ms."""


class Operation(NamedTuple):
    """An operation between ranks.

    Attributes:
        passes: How often a ring passes (n - 1) / n of the array; 0: it goes from rank to rank.
        is_divided: Whether the array has a part for each rank.
        num_tensors: The tensors that together are the array.
    """

    title: str
    passes: int = 0
    explanation: str = ""
    is_divided: bool = False
    num_tensors: int = 1

    def bus_factor(self, num_ranks: int) -> float:
        """Returns the bus bandwidth divided by the algorithm bandwidth."""
        return self.passes * (num_ranks - 1) / num_ranks if self.passes else 1.0

    def num_elements(self, num_bytes: int, num_ranks: int) -> int:
        """Returns how many elements an array of about so many bytes has."""
        least = num_ranks if self.is_divided else self.num_tensors
        num = max(least, -(-num_bytes // ELEMENT_BYTES))
        return -(-num // least) * least if self.is_divided else num


OPERATIONS = {
    ALLREDUCE: Operation("allreduce", 2),
    ALLREDUCE_OF_16: Operation(
        f"allreduce of {NUM_TENSORS} tensors",
        2,
        "together they have this size",
        num_tensors=NUM_TENSORS,
    ),
    BROADCAST: Operation("broadcast"),
    ALLGATHER: Operation("allgather", 1, is_divided=True),
    REDUCE_SCATTER: Operation("reduce-scatter", 1, is_divided=True),
    POINT_TO_POINT: Operation(
        "point to point", 0, "half of a round trip between the first and the last rank"
    ),
    ON_NODE: Operation(
        "point to point on a node", 0, "half of a round trip between two ranks of a node"
    ),
    STREAM: Operation(
        "stream of messages", 0, "from the first to the last rank; times are per message"
    ),
}
"""The operations by name, in the order in which they are measured."""


@dataclass(frozen=True)
class Call:
    """An operation on an array, ready to be timed; all ranks call it the same number of times.

    `run` does it once, and returns when this rank's part is complete; `received` returns what this
    rank has received, where it is that of one rank, of `source`. `num_messages` follow each other
    in it. Between two ranks the times of the first one count, as with OSU's benchmarks.
    """

    run: Callable[[], Any]
    received: Callable[[], NDArray[Any] | None]
    source: int = 0
    num_messages: int = 1
    is_timed: bool = True


class Overlap(NamedTuple):
    """An allreduce beside computing, ready to be timed.

    `compute` computes so many products of matrices, one after the other; `together` does the same,
    and an allreduce that begins before it and may go on meanwhile.
    """

    compute: Callable[[int], Any]
    together: Callable[[int], Any]


class Transport(ABC):
    """A library that transfers arrays between ranks, at least two; all must call its methods.

    It sets environment variables before its library starts.
    """

    operations: Sequence[str]
    """The names of those that it offers, as far as training uses it for them."""
    averages = True
    """Whether an allreduce returns the mean and not the sum, as gradients are averaged."""

    def __init__(self, comm: Communicator, variables: Mapping[str, str]) -> None:
        self.comm, self.variables = comm, variables

    @abstractmethod
    def start(self) -> dict[str, Any]:
        """Starts it; returns its settings and version, or raises CandleError on every rank."""

    def stop(self) -> None:  # noqa: B027
        """Stops it, so that another one is measured alone."""

    @abstractmethod
    def prepare(self, operation: str, values: Floats) -> Call:
        """Returns a call of an operation on this rank's array: for ALLGATHER, on its part."""

    @abstractmethod
    def overlap(self, values: Floats) -> Overlap:
        """Returns an allreduce of an array beside computing."""


class TransportKind(NamedTuple):
    """What must be known of a transport before its library is imported.

    `class_name` is that of a class in candle_p1.bench.transport_libraries.
    """

    class_name: str
    packages: tuple[str, ...]
    what: str
    variables: Mapping[str, str] = {}
    on_one_node: bool = False


OF_HOROVOD = ("mpi4py", "tensorflow", "horovod")
TRANSPORTS = {
    "mpi": TransportKind(
        "MpiTransport",
        ("mpi4py",),
        "MPI on buffers, as the data of loading and all small messages go",
    ),
    "shared_memory": TransportKind(
        "SharedMemoryTransport",
        ("mpi4py", "tensorflow"),
        "memory that the ranks of a node share, as gradients are averaged on the CPUs of one node",
        on_one_node=True,
    ),
    "horovod": TransportKind(
        "HorovodTransport",
        OF_HOROVOD,
        "Horovod as a run sets it: no fusion, cycle time 1 ms, unless its variables say otherwise",
    ),
    "horovod_fusion": TransportKind(
        "HorovodTransport",
        OF_HOROVOD,
        "Horovod's own defaults, as with --deterministic False: fusion to 128 MiB, cycle time 1 ms",
        {FUSION: str(128 << 20), CYCLE: "1"},
    ),
    "horovod_paper": TransportKind(
        "HorovodTransport",
        OF_HOROVOD,
        "Horovod's defaults when the paper was written: fusion to 64 MiB, cycle time 5 ms",
        {FUSION: str(64 << 20), CYCLE: "5"},
    ),
    "jax": TransportKind(
        "JaxTransport",
        ("mpi4py", "jax"),
        "XLA's collectives within a compiled program: Gloo on CPUs, NCCL or RCCL on GPUs",
    ),
}
"""The transports by name, in the order in which they are measured."""


def missing_packages(name: str) -> list[str]:
    """Returns the packages that a transport needs and that are not installed."""
    return [package for package in TRANSPORTS[name].packages if find_spec(package) is None]


def choose_transports(text: str | None, *, one_process: bool = False) -> list[str]:
    """Returns the transports of a comma-separated list; None: all that are installed.

    Raises:
        ParameterError: One of them is not known or not installed, or they cannot all be measured in
            one process where that is wanted.
    """
    if text is None:
        installed = [name for name in TRANSPORTS if not missing_packages(name)]
        if not installed:
            raise ParameterError(
                "no library of communication is installed: install candle-p1[cpu] or"
                " candle-p1[jax-mpi]"
            )
        return in_one_process(installed) if one_process else installed
    names = choose_names(text, TRANSPORTS, "--transport")
    for name in names:
        if lacks := ", ".join(missing_packages(name)):
            raise ParameterError(f"--transport {name}: not installed in this environment: {lacks}")
    if one_process and (more := [name for name in names if name not in in_one_process(names)]):
        raise ParameterError(
            f"--transport: {', '.join(more)}: the settings of Horovod cannot be changed within a"
            " process, and a launcher has started this one: measure them with a command each"
        )
    return names


def in_one_process(names: Iterable[str]) -> list[str]:
    """Returns those of some transports that one process can measure, one after the other.

    Horovod 0.28 can be started again, but crashes if its settings are set again
    (horovod::common::ParameterManager), so there is one transport of each library.
    """
    of_libraries: dict[str, str] = {}
    for name in names:
        of_libraries.setdefault(TRANSPORTS[name].class_name, name)
    return list(of_libraries.values())


def make_transport(name: str, comm: Communicator) -> Transport:
    """Returns a transport, which is to be started before it is used."""
    kind, libraries = TRANSPORTS[name], import_module("candle_p1.bench.transport_libraries")
    made: Transport = getattr(libraries, kind.class_name)(comm, kind.variables)
    return made


def given(operation: str, rank: int, num_ranks: int, num_elements: int) -> Floats:
    """Returns the array that a rank contributes: integers, whose sums are exact.

    `num_elements` is that of the whole array; see Operation.num_elements.
    """
    num = num_elements // num_ranks if operation == ALLGATHER else num_elements
    values = np.empty(num, np.float32)
    for part in _chunks(num):
        values[part] = _values(rank, part)
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

    For `source` see Call; `averages` says whether the transport averages in an allreduce.
    """
    length = num_elements // num_ranks if OPERATIONS[operation].is_divided else num_elements
    if received.shape != (length if operation == REDUCE_SCATTER else num_elements,):
        return False
    is_allreduce = operation in (ALLREDUCE, ALLREDUCE_OF_16)
    is_sum = is_allreduce or operation == REDUCE_SCATTER
    factor, others = 1, 0
    if is_sum:
        factor, others = num_ranks, sum(each % PERIOD for each in range(num_ranks))
    divisor = num_ranks if averages and is_allreduce else 1
    first = rank * length if operation == REDUCE_SCATTER else 0
    ranks = range(num_ranks) if operation == ALLGATHER else [0 if is_sum else source]
    for number, of_rank in enumerate(ranks):
        mine = received[number * length :]
        for part in _chunks(length):
            wanted = (_values(of_rank, part, first) * factor + others) / divisor
            if not np.all(np.abs(mine[part] - wanted) <= TOLERANCE * wanted):  # nor is NaN
                return False
    return True


def _chunks(num: int) -> Iterator[slice]:
    yield from (slice(begin, min(begin + CHUNK, num)) for begin in range(0, num, CHUNK))


def _values(rank: int, part: slice, first: int = 0) -> Floats:
    """Returns a range of at most CHUNK of the elements that a rank contributes, after the first."""
    begin = (first + part.start) % PERIOD
    values: Floats = _periods()[begin : begin + part.stop - part.start]
    return values + np.float32(rank % PERIOD)


@cache
def _periods() -> Floats:
    """Returns 0 to PERIOD - 1 again and again: CHUNK elements from any place of the first."""
    return np.resize(np.arange(PERIOD, dtype=np.float32), CHUNK + PERIOD)
