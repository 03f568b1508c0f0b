"""Counts what every rank receives in every phase of a run, at thousands of ranks in one process.

The ranks are simulated (candle_p1.distributed.simulated) and call the code of a run
(candle_p1.bench.simulated_run). Nothing is timed: messages and bytes depend on the number of ranks
and nodes, not on the machine.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.bench.simulated_run import NUM_COLUMNS, NUM_ROWS, PHASES, RankOfRun, Scenario
from candle_p1.bench.tables import plain_table
from candle_p1.distributed.simulated import WHOLE_RUN, SimulatedJob, Traffic
from candle_p1.errors import SetupError
from candle_p1.records import environment
from candle_p1.records.record import utc_now
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.table import Table

    from candle_p1.distributed.simulated import SimulatedCommunicator

MAX_RANKS = 8192
FILES_PER_RANK = 4
FEW_FILES = 512
FIRST, LEADER, OTHER = "rank 0", "first rank of each other node", "other ranks"
EVERY_PHASE = "all phases"
NOTES = (
    f"The first rank of a node also receives the rows of the other nodes, here at most"
    f" {4 * NUM_ROWS * NUM_COLUMNS:,} bytes for each load.",
    "Not counted: Horovod's broadcast of the model and allreduces of gradients, which TensorFlow"
    " calls; the TCP connections to the watchdog server; what the MPI library itself sends.",
)


@dataclass(frozen=True)
class ScaleMeasurement:
    """What is counted.

    Attributes:
        ranks: The numbers of ranks.
        ranks_per_node: The ranks on each node.
    """

    ranks: Sequence[int]
    ranks_per_node: int = 8

    def measure(self, on_start: Callable[[int, int, str], None]) -> dict[str, Any]:
        """Returns what ``--json`` writes; all files are in a temporary directory.

        Args:
            on_start: Called before each job with the number of jobs done, that of all, and a name.

        Raises:
            SetupError: This process may not open as many files, or start as many threads, as the
                ranks need.
        """
        results: list[dict[str, Any]] = []
        for done, num_ranks in enumerate(self.ranks):
            on_start(done, len(self.ranks), count(num_ranks, "rank"))
            job = count_traffic(num_ranks, self.ranks_per_node)
            results += _results(job)
        return {
            "simulated": True,
            "command": sys.argv,
            "started": utc_now(),
            "ranks_per_node": self.ranks_per_node,
            "results": results,
            "notes": list(NOTES),
            "machine": environment.capture(),
        }


def count_traffic(num_ranks: int, ranks_per_node: int) -> SimulatedJob:
    """Returns a simulated job that has run all phases, with what its ranks received.

    Raises:
        SetupError: See `ScaleMeasurement.measure`.
    """
    _allow_files(FEW_FILES + FILES_PER_RANK * num_ranks)
    simulated = SimulatedJob(num_ranks, ranks_per_node)
    with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as name:
        scenario = Scenario.make(Path(name), num_ranks)

        def run(comm: SimulatedCommunicator) -> None:
            rank = RankOfRun(scenario, comm)
            try:
                for phase, work in PHASES.items():
                    with simulated.phase(phase, comm.rank):
                        work(rank)
            finally:
                rank.close()

        try:
            simulated.run(run)
        except RuntimeError as error:  # what Python raises if it cannot start a thread
            raise SetupError(
                f"{count(num_ranks, 'rank')} cannot be simulated here: {error}. Allow this process"
                " more threads (ulimit -u, or the limits of its container), or count fewer ranks"
            ) from error
    return simulated


def _allow_files(num: int) -> None:
    """Raises this process's limit of open files, if necessary and possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num:
        if hard != resource.RLIM_INFINITY and hard < num:
            raise SetupError(
                f"the ranks would open about {num:,} files, and this process may open {hard:,}:"
                " raise the limit (ulimit -Hn), or count fewer ranks"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (num, hard))


def kinds_of_ranks(num_ranks: int, ranks_per_node: int) -> dict[str, list[int]]:
    """Returns the ranks by what they do; a kind of which there is none is left out."""
    kinds: dict[str, list[int]] = {FIRST: [0], LEADER: [], OTHER: []}
    for rank in range(1, num_ranks):
        kinds[OTHER if rank % ranks_per_node else LEADER].append(rank)
    return {kind: ranks for kind, ranks in kinds.items() if ranks}


def _results(job: SimulatedJob) -> Iterator[dict[str, Any]]:
    """Yields, for each phase and kind of rank, the most that one rank of that kind received."""
    totals = [
        Traffic(
            sum(each.num_messages for each in phases.values()),
            sum(each.num_bytes for each in phases.values()),
        )
        for phases in job.traffic
    ]
    by_phase = {phase: job.received(phase) for phase in PHASES} | {EVERY_PHASE: totals}
    rest = job.received(WHOLE_RUN)
    if any(each.num_messages for each in rest):
        by_phase["outside of all phases"] = rest
    for phase, received in by_phase.items():
        for kind, ranks in kinds_of_ranks(job.num_ranks, job.ranks_per_node).items():
            yield {
                "variant": phase,
                "num_ranks": job.num_ranks,
                "ranks": kind,
                "num_messages": max(received[rank].num_messages for rank in ranks),
                "num_bytes": max(received[rank].num_bytes for rank in ranks),
            }


def parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables that show what was counted.

    Args:
        report: What `ScaleMeasurement.measure` returned.
    """
    results = report["results"]
    numbers = list(dict.fromkeys(each["num_ranks"] for each in results))
    phases = list(dict.fromkeys(each["variant"] for each in results))
    found = {(each["ranks"], each["variant"], each["num_ranks"]): each for each in results}
    yield (
        f"what a rank receives in each phase, counted on simulated ranks,"
        f" {report['ranks_per_node']} on a node"
    )
    for kind in (FIRST, LEADER, OTHER):
        present = [number for number in numbers if (kind, phases[0], number) in found]
        if not present:
            continue
        columns = [f"{unit}\n{number:,} ranks" for number in present for unit in _units(kind)]
        table = plain_table(kind, *columns)
        for phase in phases:
            row = [phase]
            for number in present:
                result = found[kind, phase, number]
                num_bytes = result["num_bytes"]
                row += [f"{result['num_messages']:,}", f"{num_bytes:,}"]
                row += [f"{num_bytes / number:,.0f}"] if kind == FIRST else []
            table.add_row(*row)
        yield table
    for note in report["notes"]:
        yield f"note: {note}"


def _units(kind: str) -> tuple[str, ...]:
    return ("messages", "bytes", "B / P") if kind == FIRST else ("messages", "bytes")
