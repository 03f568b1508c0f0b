"""What the ranks of ``candle-p1 bench comm`` do: time operations on arrays, in blocks of calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter as clock_s
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from candle_p1.bench.task import BenchTask, Outcome
from candle_p1.bench.transports import (
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_OF_16,
    ELEMENT_BYTES,
    OPERATIONS,
    REDUCE_SCATTER,
    TRANSPORTS,
    Call,
    Floats,
    Transport,
)
from candle_p1.distributed.comm import Communicator
from candle_p1.errors import DistributedError, ParameterError
from candle_p1.records.environment import memory_limit_bytes
from candle_p1.reports.statistics import median_interval

OVERLAP_BYTES = range(1 << 16, (1 << 26) + 1)
"""Sizes of an allreduce that is also done beside computing: what smaller ones take is latency, and
single gradients are seldom larger."""
PRECISION = 0.05
"""A size is measured until its 95 % interval extends no further than this from the median."""
MEMORY_SHARE, ARRAYS = 0.5, 4
"""The part of the free memory that all ranks of a node may fill with arrays, and how many of a size
a rank has at most: what it gives, what it receives, and a library's copies of both."""
NUM_BLOCKS, LEAST_BLOCKS, NUM_ROUNDS = 20, 3, 3
"""Into how many blocks the time of a size is divided; how many there are however long a call takes;
and how often all sizes are timed in turn, so that what slows the machine for a while falls on many
sizes, and on a part of the times of each."""
MAX_CALLS, PROBED_PRODUCTS, LARGE_ELEMENTS = 100_000, 16, 1 << 20
GRADIENT_BYTES = {
    "P1B2": 118_162_472,
    "P1B3": 120_354_804,
    "NT3": 619_691_672,
    "P1B1": 977_600_340,
}
"""The gradients of one step, in float32, of each benchmark with its default network and CANDLE's
data: 4 bytes times the 29.5, 30.1, 154.9 and 244.4 million parameters."""
ONE_RANK = "ranks that communicate are at least two"
PERIOD, CHUNK, TOLERANCE = 251, 1 << 20, 1e-5
"""Arrays repeat after so many elements, a prime, so that no block of an algorithm divides it; and
are compared in parts of so many."""


def given(operation: str, rank: int, num_ranks: int, num_elements: int) -> Floats:
    """Returns the array that a rank contributes: integers, whose sums are exact.

    `num_elements` is that of the whole array; see Operation.num_elements.
    """
    num = num_elements // num_ranks if operation == ALLGATHER else num_elements
    return np.resize(np.arange(PERIOD, dtype=np.float32) + np.float32(rank % PERIOD), num)


def is_expected(
    received: NDArray[Any],
    operation: str,
    rank: int,
    num_ranks: int,
    num_elements: int,
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
    others = sum(each % PERIOD for each in range(num_ranks))
    divisor = num_ranks if averages and is_allreduce else 1
    for begin in range(0, len(received), CHUNK):
        part = received[begin : begin + CHUNK]
        elements = np.arange(begin, begin + len(part))
        if operation == ALLGATHER:
            wanted = elements % length % PERIOD + elements // length % PERIOD
        elif is_allreduce or operation == REDUCE_SCATTER:
            first = rank * length if operation == REDUCE_SCATTER else 0
            wanted = (first + elements) % PERIOD * num_ranks + others
        else:
            wanted = elements % PERIOD + source % PERIOD
        if not np.allclose(part, wanted / divisor, rtol=TOLERANCE, atol=0):  # nor is NaN
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class CommTask(BenchTask):
    """What the ranks measure: sizes of arrays in bytes, and for ALLREDUCE those of gradients, too.

    Each is measured for so many seconds, unless it is precise before.
    """

    transports: Sequence[str]
    operations: Sequence[str] = tuple(OPERATIONS)
    sizes: Sequence[int] = ()
    gradients: Sequence[int] = ()
    seconds: float = 0.5
    overlaps: bool = True

    def choose_backend(self) -> None:
        """Does nothing: a transport chooses the backend of its engine."""

    def measure(self, comm: Communicator) -> Outcome:
        """Returns what the ranks have measured, the same on all; collective."""
        if comm.size == 1:
            raise ParameterError(
                f"there is one rank, and {ONE_RANK}: give --np, or start this command on several"
                " ranks with the machine's launcher"
            )
        chosen = [TRANSPORTS[name] for name in self.transports]
        possible = [kind for kind in chosen if comm.num_nodes == 1 or not kind.on_one_node]
        if not possible:
            raise ParameterError(
                f"--transport {', '.join(self.transports)}: the ranks are on {comm.num_nodes}"
                " nodes, and only ranks of one node share memory"
            )
        free = min(int(psutil.virtual_memory().available), memory_limit_bytes())
        mine = MEMORY_SHARE * free / (ARRAYS * comm.local_size)
        limit_bytes = int(-comm.allreduce_max(np.array([-mine]))[0])
        settings, points, overlaps = {}, list[Outcome](), list[Outcome]()
        for transport in (kind(comm) for kind in possible):
            settings[transport.name] = transport.start()
            of_transport = [
                point
                for operation in OPERATIONS
                if operation in self.operations and operation in transport.operations
                for point in self.points(transport, operation, limit_bytes)
            ]
            for point in of_transport if self.overlaps else ():
                if point["operation"] == ALLREDUCE and point["bytes"] in OVERLAP_BYTES:
                    overlaps.append(self.overlap(transport, point))
                    gc.collect()
            points += of_transport
            comm.barrier()
            transport.stop()
        return {
            "num_ranks": comm.size,
            "num_nodes": comm.num_nodes,
            "ranks_per_node": comm.local_size,
            "limit_bytes": limit_bytes,
            "settings": settings,
            "points": points,
            "overlaps": overlaps,
        }

    def points(self, transport: Transport, operation: str, limit_bytes: int) -> list[Outcome]:
        """Returns the times of an operation for all sizes, ascending; collective."""
        kind, comm = OPERATIONS[operation], transport.comm
        wanted = {*self.sizes, *(self.gradients if operation == ALLREDUCE else ())}
        numbers = {kind.num_elements(size, comm.size) for size in wanted if size <= limit_bytes}
        timers: dict[int, Timer] = {}
        for _ in range(NUM_ROUNDS):
            for num in sorted(numbers):
                values = given(operation, comm.rank, comm.size, num)
                call = transport.prepare(operation, values)
                call.run()
                if num not in timers:
                    _check(transport, operation, num, call)
                    timers[num] = Timer(comm, call)
                timers[num].time(call.run, self.seconds / NUM_ROUNDS, self.seconds / NUM_BLOCKS)
                if num > LARGE_ELEMENTS:
                    del values, call
                    gc.collect()  # TensorFlow's functions hold their arrays in cycles
        points = []
        for num, timer in sorted(timers.items()):
            num_bytes, times = num * ELEMENT_BYTES, timer.times()
            rate = num_bytes / times["mean_s"]
            named = [name for name, size in GRADIENT_BYTES.items() if size == num_bytes]
            points.append(
                {
                    "transport": transport.name,
                    "operation": operation,
                    "bytes": num_bytes,
                    **times,
                    "algorithm_bytes_per_s": rate,
                    "bus_bytes_per_s": rate * kind.bus_factor(comm.size),
                    "gradients_of": named[0] if named and operation == ALLREDUCE else None,
                }
            )
        return points

    def overlap(self, transport: Transport, point: Outcome) -> Outcome:
        """Returns the times of an allreduce beside computing that takes about as long alone.

        As in osu_iallreduce, ``hidden_share`` is 1 - ``exposed_s`` / ``communication_s``, from 0 to
        1, where ``exposed_s`` is ``together_s`` - ``computing_s``; collective.
        """
        comm, alone_s = transport.comm, point["mean_s"]
        num_elements = point["bytes"] // ELEMENT_BYTES
        compute, together = transport.overlap(given(ALLREDUCE, comm.rank, comm.size, num_elements))

        def mean_s(work: Callable[[int], Any], num: int, seconds: float) -> float:
            return float(timed(lambda: work(num), comm, seconds)["mean_s"])

        together(PROBED_PRODUCTS)
        compute(PROBED_PRODUCTS)
        product_s = mean_s(compute, PROBED_PRODUCTS, self.seconds / 10) / PROBED_PRODUCTS
        num = max(1, min(MAX_CALLS, round(alone_s / product_s)))
        computing_s = mean_s(compute, num, self.seconds)
        together_s = mean_s(together, num, self.seconds)
        return {
            "transport": point["transport"],
            "bytes": point["bytes"],
            "communication_s": alone_s,
            "computing_s": computing_s,
            "together_s": together_s,
            "exposed_s": together_s - computing_s,
            "hidden_share": min(1.0, max(0.0, 1 - (together_s - computing_s) / alone_s)),
        }


def _check(transport: Transport, operation: str, num_elements: int, call: Call) -> None:
    comm, received = transport.comm, call.received()
    which = (operation, comm.rank, comm.size, num_elements, call.source, transport.averages)
    is_wrong = received is not None and not is_expected(received, *which)
    if wrong := comm.first(comm.rank if is_wrong else None):
        raise DistributedError(
            f"{transport.name}: {OPERATIONS[operation].title} of {num_elements * ELEMENT_BYTES}"
            f" bytes: rank {wrong[0]} has received other values than were sent"
        ).on_all_ranks()


class Timer:
    """Times calls in blocks, each after a barrier, until they are precise; collective.

    What the ranks decide follows from numbers that all of them have.
    """

    def __init__(self, comm: Communicator, call: Call) -> None:
        self._comm, self._num_messages, self._is_timed = comm, call.num_messages, call.is_timed
        self._num_calls = 1
        self._blocks: list[tuple[float, float, float]] = []

    def time(self, run: Callable[[], Any], seconds: float, block_s: float) -> None:
        """Times at least LEAST_BLOCKS more blocks, after a warm-up; collective.

        The first time, the warm-up is a single call and then a whole block, if it has more; they
        tell how many calls a block of `block_s` should have. `run` must have been called before.
        """
        is_first = not self._blocks
        for _ in range(1 + is_first):
            slowest_s = self._block(run)[2]
            if is_first:
                self._num_calls = max(1, min(MAX_CALLS, int(block_s / slowest_s)))
            if self._num_calls == 1:
                break
        num_blocks, spent_s = 0, 0.0
        while num_blocks < LEAST_BLOCKS or (spent_s < seconds and not self._is_precise):
            self._blocks.append(self._block(run))
            num_blocks += 1
            spent_s += self._blocks[-1][2] * self._num_calls

    def times(self) -> Outcome:
        """Returns the medians over blocks of the least, mean and largest time of ranks, in s.

        The interval of the mean, ``ci95_s``, is None for too few blocks.
        """
        scaled = np.array(self._blocks) / self._num_messages
        least, mean, most = scaled.T.tolist()
        return {
            "min_s": median(least),
            "mean_s": median(mean),
            "max_s": median(most),
            "ci95_s": median_interval(mean),
            "blocks_s": mean,
            "calls_per_block": self._num_calls,
            "stopped_by": "precision" if self._is_precise else "time",
        }

    @property
    def _is_precise(self) -> bool:
        means = [mean for _, mean, _ in self._blocks]
        ends, middle = median_interval(means), median(means)
        return ends is not None and max(abs(end - middle) for end in ends) <= PRECISION * middle

    def _block(self, run: Callable[[], Any]) -> tuple[float, float, float]:
        """Returns the least, mean and largest time of a call."""
        self._comm.barrier()
        begin = clock_s()
        for _ in range(self._num_calls):
            run()
        mine_s = (clock_s() - begin) / self._num_calls
        everyone = self._comm.allgather(mine_s if self._is_timed else None)
        times_s = [each for each in everyone if each is not None]
        return min(times_s), fmean(times_s), max(times_s)


def timed(run: Callable[[], Any], comm: Communicator, seconds: float) -> Outcome:
    """Returns the times of calls that are timed without a pause; collective. See `Timer.time`."""
    timer = Timer(comm, Call(run))
    timer.time(run, seconds, seconds / NUM_BLOCKS)
    return timer.times()
