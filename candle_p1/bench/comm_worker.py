"""A rank of a job that times the exchange of arrays.

``python -m candle_p1.bench.comm_worker DIRECTORY`` under a launcher; `measure` is also called by
the command itself where a launcher has started it.
"""

from __future__ import annotations

import gc
import traceback
from statistics import median
from time import perf_counter as clock_s
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil

from candle_p1.bench.comm import (
    ARRAYS,
    MEMORY_SHARE,
    OVERLAP_BYTES,
    PRECISION,
    CommOutcome,
    TimedOverlap,
    TimedSize,
    gradients_of,
)
from candle_p1.bench.worker import serve
from candle_p1.distributed.comm import connect
from candle_p1.distributed.transports import TRANSPORTS, make_transport
from candle_p1.distributed.transports.transport import (
    ALLREDUCE,
    ELEMENT_BYTES,
    OPERATIONS,
    given,
    is_expected,
)
from candle_p1.errors import EXIT_CODE, CandleError, DistributedError, ParameterError
from candle_p1.records.environment import memory_limit_bytes
from candle_p1.records.record import utc_now
from candle_p1.reports.statistics import median_interval
from candle_p1.text import print_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from candle_p1.bench.comm import CommJob, CommMeasurement
    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.transports.transport import Call, Transport

NUM_BLOCKS = 20
"""The time of a size is divided into about so many blocks."""
LEAST_BLOCKS = 3
"""However long a call takes: of three, one that was disturbed does not count."""
NUM_ROUNDS = 3
"""All sizes of an operation are timed in turn so often, each time for a part of the seconds: what
slows the machine for a while falls on many sizes, and on a part of the times of each."""
MAX_CALLS = 100_000
LARGE_ELEMENTS = 1 << 20
MAX_PRODUCTS = 100_000
PROBED_PRODUCTS = 16
"""How many products are timed to find out how many take as long as an allreduce."""


class Times(NamedTuple):
    """Times per call, in s; see candle_p1.bench.comm.TimedSize."""

    min_s: float
    mean_s: float
    max_s: float
    ci95_s: list[float] | None
    blocks_s: list[float]
    calls_per_block: int
    stopped_by: str


def measure(job: CommJob, comm: Communicator) -> CommOutcome:
    """Returns what the ranks have measured, the same on all; collective.

    Raises:
        CandleError: There is a single rank, a transport cannot be started, or what it transfers is
            wrong; the same on every rank.
    """
    if comm.size == 1:
        raise ParameterError(
            "there is one rank, and ranks that communicate are at least two: give --np, or start"
            " this command on several ranks with the machine's launcher"
        )
    limit_bytes = memory_for_an_array(comm)
    outcome = CommOutcome(comm.size, comm.num_nodes, comm.local_size, limit_bytes)
    for name in possible(job.transports, comm):
        transport = make_transport(name, comm)
        outcome.settings[name] = transport.start()
        for operation in OPERATIONS:
            if operation in job.operations and operation in transport.operations:
                outcome.points += _points(job, name, transport, operation, limit_bytes)
        if job.overlaps and ALLREDUCE in job.operations:
            outcome.overlaps += _overlaps(job, name, transport, outcome.points)
        comm.barrier()
        transport.stop()
    return outcome


def possible(transports: Sequence[str], comm: Communicator) -> list[str]:
    """Returns the transports that can connect these ranks.

    Raises:
        ParameterError: None can.
    """
    found = [name for name in transports if comm.num_nodes == 1 or not TRANSPORTS[name].on_one_node]
    if not found:
        raise ParameterError(
            f"--through {', '.join(transports)}: the ranks are on {comm.num_nodes} nodes, and only"
            " ranks of one node share memory"
        )
    return found


def measure_here(measurement: CommMeasurement) -> dict[str, Any] | None:
    """Measures on the ranks that a launcher has started, of which this process is one; collective.

    Returns:
        What ``--json`` writes, on rank 0; None on the others.

    An error, which is printed, ends this process.
    """
    started = utc_now()
    comm = connect()
    try:
        outcome = measure(measurement.job, comm)
        report = measurement.report([outcome], started) if comm.rank == 0 else None
        comm.barrier()
    except CandleError as error:
        if comm.rank == 0 or not error.agreed:
            print_error(error)
        if not error.agreed:
            comm.abort(EXIT_CODE)
        comm.end(EXIT_CODE)
    except Exception:
        traceback.print_exc()
        comm.abort(1)
    return report


def memory_for_an_array(comm: Communicator) -> int:
    """Returns the largest array, in bytes, that all ranks of every node can have; collective."""
    free = min(int(psutil.virtual_memory().available), memory_limit_bytes())
    mine = MEMORY_SHARE * free / (ARRAYS * comm.local_size)
    return int(-comm.allreduce_max(np.array([-mine]))[0])


def _points(
    job: CommJob, name: str, transport: Transport, operation: str, limit_bytes: int
) -> list[TimedSize]:
    """Returns the times of an operation for all sizes, ascending."""
    kind, comm = OPERATIONS[operation], transport.comm
    wanted = {*job.sizes, *(job.gradients if operation == ALLREDUCE else ())}
    numbers = {kind.num_elements(size, comm.size) for size in wanted if size <= limit_bytes}
    timers: dict[int, Timer] = {}
    for _ in range(NUM_ROUNDS):
        for num_elements in sorted(numbers):
            _visit(job, name, transport, operation, num_elements, timers)
            if num_elements > LARGE_ELEMENTS:
                gc.collect()  # TensorFlow's functions hold their arrays in cycles
    return [_point(name, operation, num, comm.size, timers[num].times) for num in sorted(numbers)]


def _visit(
    job: CommJob,
    name: str,
    transport: Transport,
    operation: str,
    num_elements: int,
    timers: dict[int, Timer],
) -> None:
    """Times an operation on arrays of a size for one round; checks what it does the first time."""
    comm = transport.comm
    call = transport.prepare(operation, given(operation, comm.rank, comm.size, num_elements))
    call.run()
    if num_elements not in timers:
        _check(name, transport, operation, num_elements, call)
        timers[num_elements] = Timer(comm, call.num_messages, is_timed=call.is_timed)
    timers[num_elements].time(
        call.run,
        job.seconds / NUM_ROUNDS,
        block_s=job.seconds / NUM_BLOCKS,
        least_blocks=LEAST_BLOCKS,
    )


def _point(name: str, operation: str, num_elements: int, num_ranks: int, times: Times) -> TimedSize:
    num_bytes = num_elements * ELEMENT_BYTES
    rate = num_bytes / times.mean_s
    return TimedSize(
        name,
        operation,
        num_bytes,
        *times,
        algorithm_bytes_per_s=rate,
        bus_bytes_per_s=rate * OPERATIONS[operation].bus_factor(num_ranks),
        gradients_of=gradients_of(num_bytes, operation),
    )


def _check(name: str, transport: Transport, operation: str, num_elements: int, call: Call) -> None:
    """Checks what the first call has transferred; collective.

    Raises:
        DistributedError: It is wrong on some rank.
    """
    comm, received = transport.comm, call.received()
    is_wrong = received is not None and not is_expected(
        received,
        operation,
        comm.rank,
        comm.size,
        num_elements,
        source=call.source,
        averages=transport.averages,
    )
    wrong = comm.first(comm.rank if is_wrong else None)
    if wrong:
        raise DistributedError(
            f"{name}: {OPERATIONS[operation].title} of {num_elements * ELEMENT_BYTES} bytes: rank"
            f" {wrong[0]} has received other values than were sent"
        ).on_all_ranks()


class Timer:
    """Times calls in blocks, each after a barrier, until they are precise; collective.

    What the ranks decide follows from numbers that all of them have.

    Args:
        comm: The ranks.
        num_messages: What the times are divided by.
        is_timed: Whether this rank's times count.
    """

    def __init__(self, comm: Communicator, num_messages: int = 1, *, is_timed: bool = True) -> None:
        self._comm, self._num_messages, self._is_timed = comm, num_messages, is_timed
        self._num_ranks = int(comm.allreduce_sum(np.array([is_timed], np.int64))[0])
        self._num_calls = 0
        self._blocks: list[tuple[float, float, float]] = []
        self._interval: tuple[float, float] | None = None

    def time(
        self, run: Callable[[], Any], seconds: float, *, block_s: float, least_blocks: int
    ) -> None:
        """Times more blocks, after a warm-up; collective.

        The first time, the warm-up is a single call and then a whole block, if it has more; they
        tell how many calls a block should have.

        Args:
            run: What is called; it must have been called before.
            seconds: How long to go on at most, apart from the warm-up.
            block_s: How long a block should take.
            least_blocks: How many blocks are timed, however long they take.
        """
        if self._num_calls:
            self._block(run, self._num_calls)
        else:
            self._num_calls = 1
            for _ in range(2):
                slowest_s = self._block(run, self._num_calls)[2]
                self._num_calls = max(1, min(MAX_CALLS, int(block_s / slowest_s)))
                if self._num_calls == 1:
                    break
        num_blocks, spent_s = 0, 0.0
        while num_blocks < least_blocks or (spent_s < seconds and not self._is_precise):
            self._blocks.append(self._block(run, self._num_calls))
            self._interval = median_interval([mean for _, mean, _ in self._blocks])
            num_blocks += 1
            spent_s += self._blocks[-1][2] * self._num_calls

    @property
    def times(self) -> Times:
        """The medians over all blocks."""
        columns = zip(*self._blocks, strict=True)
        least, mean, most = (median(column) / self._num_messages for column in columns)
        interval = self._interval
        return Times(
            least,
            mean,
            most,
            None if interval is None else [end / self._num_messages for end in interval],
            [each / self._num_messages for _, each, _ in self._blocks],
            self._num_calls,
            "precision" if self._is_precise else "time",
        )

    @property
    def _is_precise(self) -> bool:
        means = [mean for _, mean, _ in self._blocks]
        return self._interval is not None and _is_narrow(self._interval, means)

    def _block(self, run: Callable[[], Any], num_calls: int) -> tuple[float, float, float]:
        """Returns the least, mean and largest time of a call."""
        self._comm.barrier()
        begin = clock_s()
        for _ in range(num_calls):
            run()
        mine_s = (clock_s() - begin) / num_calls
        ends = [-mine_s, mine_s] if self._is_timed else [-np.inf, -np.inf]
        least, most = self._comm.allreduce_max(np.array(ends))
        total = self._comm.allreduce_sum(np.array([mine_s if self._is_timed else 0.0]))[0]
        return -float(least), float(total) / self._num_ranks, float(most)


def timed(
    run: Callable[[], Any], comm: Communicator, seconds: float, num_messages: int = 1
) -> Times:
    """Returns the times of calls that are timed without a pause; collective.

    Args:
        run: See `Timer.time`.
        comm: The ranks.
        seconds: See `Timer.time`; LEAST_BLOCKS are timed anyway.
        num_messages: See `Timer`.
    """
    timer = Timer(comm, num_messages)
    timer.time(run, seconds, block_s=seconds / NUM_BLOCKS, least_blocks=LEAST_BLOCKS)
    return timer.times


def _is_narrow(interval: tuple[float, float], values: list[float]) -> bool:
    middle = median(values)
    return max(middle - interval[0], interval[1] - middle) <= PRECISION * middle


def _overlaps(
    job: CommJob, name: str, transport: Transport, points: list[TimedSize]
) -> list[TimedOverlap]:
    """Returns the times of allreduces beside computing that takes as long, for large sizes."""
    found = []
    for point in points:
        is_allreduce = (point.transport, point.operation) == (name, ALLREDUCE)
        if is_allreduce and OVERLAP_BYTES[0] <= point.bytes <= OVERLAP_BYTES[1]:
            found.append(_overlap(job, transport, point))
            gc.collect()
    return found


def _overlap(job: CommJob, transport: Transport, point: TimedSize) -> TimedOverlap:
    comm = transport.comm
    num_elements = point.bytes // ELEMENT_BYTES
    overlap = transport.overlap(given(ALLREDUCE, comm.rank, comm.size, num_elements))
    overlap.together(PROBED_PRODUCTS)
    overlap.compute(PROBED_PRODUCTS)
    probed = timed(lambda: overlap.compute(PROBED_PRODUCTS), comm, job.seconds / 10)
    product_s = probed.mean_s / PROBED_PRODUCTS
    num = max(1, min(MAX_PRODUCTS, round(point.mean_s / product_s)))
    computing = timed(lambda: overlap.compute(num), comm, job.seconds)
    together = timed(lambda: overlap.together(num), comm, job.seconds)
    exposed_s = together.mean_s - computing.mean_s
    share = 1 - exposed_s / point.mean_s
    return TimedOverlap(
        point.transport,
        point.bytes,
        point.mean_s,
        computing.mean_s,
        together.mean_s,
        exposed_s,
        min(1.0, max(0.0, share)),
    )


if __name__ == "__main__":
    serve(measure)
