"""Finds what the measuring of a run costs: its phases, steps and log of communication."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1 import environment
from candle_p1.bench.job import launch, run
from candle_p1.bench.overhead_job import OverheadJob, OverheadOutcome
from candle_p1.bench.statistics import MIN_VALUES, median_interval
from candle_p1.benchmark import find_benchmark
from candle_p1.errors import ParameterError
from candle_p1.records import utc_now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from candle_p1.data.reader import FileSet


@dataclass(frozen=True)
class OverheadMeasurement:
    """What is measured, and under which conditions.

    Attributes:
        benchmark: The benchmark's name, path or module.
        flags: Of the benchmark.
        num_ranks: How many train, on this machine.
        num_epochs: Epochs of a stretch.
        num_rounds: Rounds of a stretch with measuring and one without.
    """

    benchmark: str
    flags: Sequence[str]
    num_ranks: int = 2
    num_epochs: int = 10
    num_rounds: int = 30

    @property
    def notes(self) -> list[str]:
        """What a user should know of how the ranks are started.

        Raises:
            SetupError: Several cannot be.
        """
        return launch(OverheadJob.worker, self.num_ranks, "").notes

    def locate_files(self, progress: Callable[[str, int, int], None] | None = None) -> FileSet:
        """Returns the files to train on, made first where they are synthetic.

        Args:
            progress: Called while they are made; see Benchmark.locate_files.

        Raises:
            CandleError: The benchmark, a flag or a file is wrong.
        """
        if environment.launcher_variable():
            raise ParameterError("this command starts ranks itself: use --np and no launcher")
        benchmark = find_benchmark(self.benchmark)
        params = benchmark.bind(benchmark.initialize_parameters(argv=self.flags))
        return benchmark.locate_files(params, progress)

    def measure(
        self,
        files: FileSet,
        starting: Callable[[int, int, str], None] = lambda done, total, what: None,
    ) -> dict[str, Any]:
        """Runs the job; returns what ``candle-p1 bench overhead --json`` writes.

        Args:
            files: As `locate_files` returned them.
            starting: Called before the job with the jobs done, all jobs, and what comes.

        Raises:
            CandleError: The job cannot train.
            RuntimeError: It has failed otherwise.
        """
        started = utc_now()
        job = OverheadJob(self.benchmark, list(self.flags), self.num_epochs, self.num_rounds)
        starting(0, 1, f"{2 * self.num_rounds} stretches of {self.num_epochs} epochs")
        outcomes = [OverheadOutcome(**found) for found in run(job, self.num_ranks)]
        # A stretch takes as long as on the slowest rank.
        measured_s = [max(each) for each in zip(*(one.measured_s for one in outcomes), strict=True)]
        bare_s = [max(each) for each in zip(*(one.bare_s for one in outcomes), strict=True)]
        ratios = [one / other for one, other in zip(measured_s, bare_s, strict=True)]
        interval = median_interval(ratios)
        num_steps = self.num_epochs * outcomes[0].steps_per_epoch
        return {
            "benchmark": find_benchmark(self.benchmark).name,
            "command": sys.argv,
            "started": started,
            "synthetic": files.synthetic,
            "num_ranks": self.num_ranks,
            "threads": outcomes[0].threads,
            "device": outcomes[0].device,
            "num_steps": num_steps,
            "num_rounds": self.num_rounds,
            "median_step_s": statistics.median(bare_s) / num_steps,
            "median_ratio": statistics.median(ratios),
            "ci95_ratio": list(interval) if interval else None,
            "range_ratio": [min(ratios), max(ratios)],
            "measured_s": measured_s,
            "bare_s": bare_s,
            "machine": environment.capture(),
        }


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a measurement says.

    Args:
        report: What `OverheadMeasurement.measure` returned.
    """
    yield (
        f"{report['benchmark']}: {report['num_ranks']} ranks x {report['threads']} threads on"
        f" {report['device']}, {report['num_rounds']} rounds of {report['num_steps']} steps with"
        f" and as many without measuring, of {1e3 * report['median_step_s']:.3g} ms each"
    )
    low, high = report["ci95_ratio"] or report["range_ratio"]
    kind = (
        "95 % interval" if report["ci95_ratio"] else f"range; {MIN_VALUES} rounds give an interval"
    )
    yield (
        f"phases, steps and the log of communication make a step longer by"
        f" {report['median_ratio'] - 1:+.2%} ({kind} {low - 1:+.2%} to {high - 1:+.2%})"
    )
    if report["synthetic"]:
        yield "the data are synthetic"
