"""Measures what ranks need to exchange arrays, by size, through every library that is installed.

The command either starts ranks on this machine, with a job for each transport, or is itself started
by a launcher on every rank, also on several nodes. Then all transports are measured in those
processes, one after the other.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from candle_p1.bench import comm_fit
from candle_p1.bench.job import BareJob, launch, run
from candle_p1.distributed.transports import TRANSPORTS, describe, missing_packages
from candle_p1.distributed.transports.transport import ALLREDUCE, OPERATIONS
from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.records import environment
from candle_p1.records.record import utc_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.bench.elsewhere import Elsewhere
    from candle_p1.bench.job import OnStart
    from candle_p1.cluster.launchers import Launch

SMALLEST_BYTES, LARGEST_BYTES = 4, 1 << 30
FACTOR, LARGE_FACTOR = 4, 2
"""Each size is so many times the one before; the second one holds for those from LARGE_BYTES on."""
LARGE_BYTES = 1 << 22
"""Arrays of such sizes leave the caches, one after the other, and the bandwidth is fitted to those
that are beyond all of them."""
HUGE_BYTES = 1 << 28
"""From here on there is also a size halfway to the next: where a library or its allocator changes
below 512 MiB, there are still enough larger sizes for a bandwidth of their own."""
OVERLAP_BYTES = (1 << 16, 1 << 26)
"""The least and the largest size of an allreduce that is also done beside computing: what smaller
ones take is latency, and single gradients are seldom larger."""
PRECISION = 0.05
"""A size is measured until its 95 % interval extends no further than this from the median."""
MEMORY_SHARE = 0.5
"""The part of the memory that is free which all ranks of a node may fill with arrays."""
ARRAYS = 4
"""How many arrays of a size a rank has at most: what it gives, what it receives, and a library's
copies of both."""

GRADIENT_BYTES = {
    "P1B2": 118_162_472,
    "P1B3": 120_354_804,
    "NT3": 619_691_672,
    "P1B1": 977_600_340,
}
"""The gradients of one step, in float32, of each benchmark with its default network and CANDLE's
data: 4 bytes times the 29.5, 30.1, 154.9 and 244.4 million parameters."""


@dataclass(frozen=True)
class CommJob(BareJob):
    """What the ranks measure.

    Attributes:
        transports: The names of the transports.
        operations: The names of the operations, of which each transport offers some.
        sizes: Sizes of arrays in bytes, ascending; those of the gradients are further ones.
        gradients: The sizes of the benchmarks' gradients, which are measured for ALLREDUCE.
        seconds: How long each size is measured, unless it is precise before.
        overlaps: Whether to measure allreduces beside computing, too.
    """

    worker: ClassVar[str] = "candle_p1.bench.comm_worker"

    transports: Sequence[str]
    operations: Sequence[str] = tuple(OPERATIONS)
    sizes: Sequence[int] = ()
    gradients: Sequence[int] = ()
    seconds: float = 0.5
    overlaps: bool = True

    @property
    def name(self) -> str:
        """The transports."""
        return ", ".join(self.transports)

    def choose_backend(self) -> None:
        """Does nothing: a transport chooses the backend of its engine."""


@dataclass(frozen=True)
class TimedSize:
    """The times of an operation on arrays of one size, in s.

    The times of all calls of a block are divided by their number, on each rank. Of each block there
    are the minimum, mean and maximum over ranks; what is stated are the medians over blocks.

    Attributes:
        transport: The transport.
        operation: The operation.
        bytes: The size of the array, as nccl-tests defines it.
        min_s: On the fastest rank.
        mean_s: The mean over ranks.
        max_s: On the slowest rank.
        ci95_s: The 95 % interval of `mean_s`; None for too few blocks.
        blocks_s: The mean over ranks of every block.
        calls_per_block: The calls of a block.
        stopped_by: "precision" if the interval is narrow enough, else "time".
        algorithm_bytes_per_s: bytes / mean_s.
        bus_bytes_per_s: See candle_p1.distributed.transports.transport.
        gradients_of: The benchmark whose gradients have this size.
    """

    transport: str
    operation: str
    bytes: int
    min_s: float
    mean_s: float
    max_s: float
    ci95_s: list[float] | None
    blocks_s: list[float]
    calls_per_block: int
    stopped_by: str
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    gradients_of: str | None = None


@dataclass(frozen=True)
class TimedOverlap:
    """An allreduce beside computing that takes about as long alone, as in osu_iallreduce.

    Attributes:
        transport: The transport.
        bytes: The size of the array.
        communication_s: The time of the allreduce alone.
        computing_s: That of the computing alone.
        together_s: That of both, which begin at the same time.
        exposed_s: together_s - computing_s.
        hidden_share: 1 - exposed_s / communication_s, from 0 to 1.
    """

    transport: str
    bytes: int
    communication_s: float
    computing_s: float
    together_s: float
    exposed_s: float
    hidden_share: float


@dataclass
class CommOutcome:
    """What the ranks have measured; the same on all of them.

    Attributes:
        num_ranks: The number of ranks.
        num_nodes: The number of nodes.
        ranks_per_node: The number of ranks on rank 0's node.
        limit_bytes: The largest array that the memory allows.
        settings: The settings and versions of each transport.
        points: All sizes of all operations.
        overlaps: The allreduces beside computing.
    """

    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    limit_bytes: int
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    points: list[TimedSize] = field(default_factory=list)
    overlaps: list[TimedOverlap] = field(default_factory=list)


def choose_sizes(smallest: int = SMALLEST_BYTES, largest: int = LARGEST_BYTES) -> list[int]:
    """Returns the sizes from the smallest to the largest one, close together where they are large.

    Raises:
        ParameterError: There is none.
    """
    sizes = []
    while smallest <= largest:
        sizes.append(smallest)
        if smallest >= HUGE_BYTES and smallest * 3 // 2 <= largest:
            sizes.append(smallest * 3 // 2)
        smallest *= FACTOR if smallest < LARGE_BYTES else LARGE_FACTOR
    if not sizes:
        raise ParameterError(f"--min_bytes {smallest} is larger than --max_bytes {largest}")
    return sizes


def choose_operations(text: str | None) -> list[str]:
    """Returns the operations of a comma-separated list, in their order; None: all.

    Raises:
        ParameterError: There is no such operation.
    """
    names = list(OPERATIONS) if text is None else [word.strip() for word in text.split(",")]
    for name in names:
        if name not in OPERATIONS:
            raise ParameterError(
                f"--operations: {name!r} is none of {', '.join(OPERATIONS)}"
                f"{did_you_mean(name, OPERATIONS)}"
            )
    return [name for name in OPERATIONS if name in names]


@dataclass(frozen=True)
class CommMeasurement:
    """What is measured, and under which conditions.

    Attributes:
        job: What the ranks measure.
        num_ranks: The ranks that are started on this machine; None: a launcher has started them.
        other: Another environment, whose transports are measured, too, as far as this one lacks
            them; None: there is none.
    """

    job: CommJob
    num_ranks: int | None = 2
    other: Elsewhere | None = None

    @property
    def notes(self) -> list[str]:
        """What the user should know in advance, such as how the ranks are started.

        Raises:
            CandleError: The ranks cannot be started.
        """
        return self._launch().notes if self.num_ranks else []

    def _launch(self) -> Launch:
        if self.num_ranks == 1:
            raise ParameterError("--np 1: ranks that communicate are at least two")
        return launch(self.job.worker, self.num_ranks or 0, "")

    def measure(self, on_start: OnStart) -> dict[str, Any]:
        """Starts the ranks, measures, and returns what ``--json`` writes.

        Args:
            on_start: Called before each job.

        Raises:
            CandleError: A job cannot do its work.
            RuntimeError: A job failed in another way.
        """
        assert self.num_ranks is not None
        started = utc_now()
        here = [(name, run) for name in self.job.transports]
        there = [] if self.other is None else [(n, self.other.run) for n in self._others()]
        outcomes: list[CommOutcome] = []
        for done, (name, run_job) in enumerate([*here, *there]):
            on_start(done, len(here) + len(there), name)
            job = replace(self.job, transports=[name])
            outcomes.append(run_job(job, self.num_ranks)[0])
        other_python = self.other.python if self.other else None
        return self.report(outcomes, started) | {"other_python": other_python}

    def _others(self) -> list[str]:
        """Returns the transports that only the other environment can have: those of its engine."""
        backend = self.other.backend if self.other else ""
        return [
            name
            for name, kind in TRANSPORTS.items()
            if missing_packages(name) and backend in kind.packages
        ]

    def report(self, outcomes: Sequence[CommOutcome], started: str) -> dict[str, Any]:
        """Returns what ``--json`` writes of the outcomes of some jobs on the same ranks."""
        first = outcomes[0]
        settings = {name: each for outcome in outcomes for name, each in outcome.settings.items()}
        points = [point for outcome in outcomes for point in outcome.points]
        limit_bytes = min(outcome.limit_bytes for outcome in outcomes)
        wanted = {*self.job.sizes, *self.job.gradients}
        return {
            "launched": self.num_ranks is None,
            "num_ranks": first.num_ranks,
            "num_nodes": first.num_nodes,
            "ranks_per_node": first.ranks_per_node,
            "transports": {
                name: {"what": what, **settings[name]} for name, what in describe(settings).items()
            },
            "not_installed": {
                name: missing_packages(name)
                for name in TRANSPORTS
                if name not in settings
                if missing_packages(name)
            },
            "seconds": self.job.seconds,
            "limit_bytes": limit_bytes,
            "left_out_bytes": sorted(size for size in wanted if size > limit_bytes),
            "gradient_bytes": GRADIENT_BYTES,
            "results": [asdict(point) for point in points],
            "overlaps": [asdict(each) for outcome in outcomes for each in outcome.overlaps],
            "fits": fits(points, first.num_ranks),
            "command": sys.argv,
            "started": started,
            "machine": environment.capture(),
        }


def fits(points: Sequence[TimedSize], num_ranks: int) -> list[dict[str, Any]]:
    """Returns the fit of every operation of every transport that has enough sizes."""
    found = []
    for transport, operation in dict.fromkeys((each.transport, each.operation) for each in points):
        fitted = comm_fit.fit(*times_of(points, transport, operation))
        if fitted is not None:
            which = {"transport": transport, "operation": operation, "num_ranks": num_ranks}
            found.append(which | fitted)
    return found


def times_of(
    points: Sequence[TimedSize], transport: str, operation: str
) -> tuple[list[int], list[float]]:
    """Returns the sizes of an operation, ascending, and their times in s."""
    chosen = sorted(
        (each.bytes, each.mean_s)
        for each in points
        if (each.transport, each.operation) == (transport, operation)
    )
    return [size for size, _ in chosen], [seconds for _, seconds in chosen]


def gradients_of(num_bytes: int, operation: str) -> str | None:
    """Returns the benchmark whose gradients have a size, in bytes; None: no benchmark's."""
    names = {size: name for name, size in GRADIENT_BYTES.items()}
    return names.get(num_bytes) if operation == ALLREDUCE else None
