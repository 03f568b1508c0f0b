"""A rank of a job that times the exchange of arrays.

``python -m candle_p1.bench.comm_worker DIRECTORY`` under a launcher; `measure` is also called by
the command itself where a launcher has started it.
"""

from __future__ import annotations

import gc
import traceback
from statistics import median
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
from candle_p1.distributed.transports import make_transport
from candle_p1.distributed.transports.transport import (
    ALLREDUCE,
    ELEMENT_BYTES,
    OPERATIONS,
    clock_s,
    given,
    is_expected,
)
from candle_p1.errors import EXIT_CODE, CandleError, DistributedError, ParameterError
from candle_p1.records.environment import memory_limit_bytes
from candle_p1.records.record import utc_now
from candle_p1.reports.statistics import median_interval
from candle_p1.text import print_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from candle_p1.bench.comm import CommJob, CommMeasurement
    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.transports.transport import Call, Transport

NUM_BLOCKS = 20
"""The time of a size is divided into about so many blocks."""
LEAST_BLOCKS = 3
"""However long a call takes: of three, one that was disturbed does not count."""
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
    for name in job.transports:
        transport = make_transport(name, comm)
        outcome.settings[name] = transport.start()
        for operation in OPERATIONS:
            if operation in job.operations and operation in transport.operations:
                outcome.points += _points(job, name, transport, operation, limit_bytes)
        if job.overlaps and ALLREDUCE in job.operations:
            outcome.overlaps += _overlaps(job, name, transport, outcome.points)
        sent = comm.first(transport.send_overhead_s)
        if sent:
            outcome.send_overheads_s[name] = sent[1]
        comm.barrier()
        transport.stop()
    return outcome


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
    kind, num_ranks = OPERATIONS[operation], transport.comm.size
    wanted = {*job.sizes, *(job.gradients if operation == ALLREDUCE else ())}
    numbers = {kind.num_elements(size, num_ranks) for size in wanted if size <= limit_bytes}
    found = []
    for num_elements in sorted(numbers):
        found.append(_point(job, name, transport, operation, num_elements))
        if num_elements > LARGE_ELEMENTS:
            gc.collect()  # TensorFlow's functions hold their arrays in cycles
    return found


def _point(
    job: CommJob, name: str, transport: Transport, operation: str, num_elements: int
) -> TimedSize:
    comm = transport.comm
    call = transport.prepare(operation, given(operation, comm.rank, comm.size, num_elements))
    call.run()
    _check(name, transport, operation, num_elements, call)
    times = timed(call.run, comm, job.seconds, call.num_messages, is_timed=call.is_timed)
    num_bytes = num_elements * ELEMENT_BYTES
    rate = num_bytes / times.mean_s
    return TimedSize(
        name,
        operation,
        num_bytes,
        *times,
        algorithm_bytes_per_s=rate,
        bus_bytes_per_s=rate * OPERATIONS[operation].bus_factor(comm.size),
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


def timed(
    run: Callable[[], Any],
    comm: Communicator,
    seconds: float,
    num_messages: int = 1,
    *,
    is_timed: bool = True,
) -> Times:
    """Times calls in blocks, each after a barrier, until they are precise; collective.

    The first block is a single call and the second one a whole block, if it has more; they warm up,
    tell how many calls a block should have, and do not count. What the ranks decide follows from
    numbers that all of them have.

    Args:
        run: What is called; it must have been called before.
        comm: The ranks.
        seconds: How long to go on at most, apart from the warm-up; LEAST_BLOCKS are timed anyway.
        num_messages: What the times are divided by.
        is_timed: Whether this rank's times count.
    """
    num_ranks = int(comm.allreduce_sum(np.array([is_timed], np.int64))[0])

    def block(num_calls: int) -> tuple[float, float, float]:
        """Returns the least, mean and largest time of a call."""
        comm.barrier()
        begin = clock_s()
        for _ in range(num_calls):
            run()
        mine_s = (clock_s() - begin) / num_calls
        ends = [-mine_s, mine_s] if is_timed else [-np.inf, -np.inf]
        least, most = comm.allreduce_max(np.array(ends))
        mean = comm.allreduce_sum(np.array([mine_s if is_timed else 0.0]))[0] / num_ranks
        return -float(least), float(mean), float(most)

    num_calls = 1
    for _ in range(2):
        slowest_s = block(num_calls)[2]
        num_calls = max(1, min(MAX_CALLS, int(seconds / NUM_BLOCKS / slowest_s)))
        if num_calls == 1:
            break
    blocks: list[tuple[float, float, float]] = []
    spent_s, interval = 0.0, None
    is_precise = False
    while len(blocks) < LEAST_BLOCKS or (spent_s < seconds and not is_precise):
        blocks.append(block(num_calls))
        spent_s += blocks[-1][2] * num_calls
        interval = median_interval([mean for _, mean, _ in blocks])
        is_precise = interval is not None and _is_narrow(interval, [b[1] for b in blocks])
    least, mean, most = (median(column) / num_messages for column in zip(*blocks, strict=True))
    return Times(
        least,
        mean,
        most,
        None if interval is None else [end / num_messages for end in interval],
        [each / num_messages for _, each, _ in blocks],
        num_calls,
        "precision" if is_precise else "time",
    )


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
