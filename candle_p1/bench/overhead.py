"""Measures the overhead of a run's own measuring: phases, steps and the log of communication."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from candle_p1.bench.job import Job, Measurement, OnStart, run
from candle_p1.reports.statistics import MIN_VALUES, median_interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from candle_p1.data.reader import FileSet


@dataclass(frozen=True)
class OverheadJob(Job):
    """What the job trains.

    Attributes:
        num_epochs: Epochs of a block.
        num_rounds: Rounds of one block with measuring and one without.
    """

    worker: ClassVar[str] = "candle_p1.bench.overhead_worker"

    num_epochs: int
    num_rounds: int

    @property
    def name(self) -> str:
        """What is measured."""
        return "overhead of measuring"


@dataclass(frozen=True)
class OverheadOutcome:
    """What a rank has measured.

    Attributes:
        measured_s: The time of each block with measuring.
        bare_s: The time of each block without.
        threads: The number of threads of an operation.
        device: "cpu", or the GPU's name.
        steps_per_epoch: The number of steps of an epoch.
        direct_s: The time of measuring one step, measured by itself; see the worker's
            `direct_cost_s`.
    """

    measured_s: list[float]
    bare_s: list[float]
    threads: int
    device: str
    steps_per_epoch: int
    direct_s: float


@dataclass(frozen=True)
class OverheadMeasurement(Measurement):
    """What is measured, and under which conditions."""

    job: OverheadJob

    def results(self, files: FileSet, on_start: OnStart) -> dict[str, Any]:
        """Runs the job; see Measurement."""
        on_start(0, 1, f"{2 * self.job.num_rounds} blocks of {self.job.num_epochs} epochs")
        outcomes: list[OverheadOutcome] = run(self.job, self.num_ranks)
        # A block takes as long as on the slowest rank.
        measured_s = [max(each) for each in zip(*(one.measured_s for one in outcomes), strict=True)]
        bare_s = [max(each) for each in zip(*(one.bare_s for one in outcomes), strict=True)]
        ratios = [one / other for one, other in zip(measured_s, bare_s, strict=True)]
        interval = median_interval(ratios)
        num_steps = self.job.num_epochs * outcomes[0].steps_per_epoch
        return {
            "num_ranks": self.num_ranks,
            "threads": outcomes[0].threads,
            "device": outcomes[0].device,
            "num_steps": num_steps,
            "num_rounds": self.job.num_rounds,
            "median_step_s": statistics.median(bare_s) / num_steps,
            "direct_s": max(outcome.direct_s for outcome in outcomes),
            "median_ratio": statistics.median(ratios),
            "ci95_ratio": list(interval) if interval else None,
            "range_ratio": [min(ratios), max(ratios)],
            "measured_s": measured_s,
            "bare_s": bare_s,
        }


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the results of a measurement as text.

    Args:
        report: What `OverheadMeasurement.measure` returned.
    """
    yield (
        f"{report['benchmark']}: {report['num_ranks']} ranks x {report['threads']} threads on"
        f" {report['device']}, {report['num_rounds']} rounds of {report['num_steps']} steps with"
        f" and without measuring; a step takes {1e3 * report['median_step_s']:.3g} ms"
    )
    low, high = report["ci95_ratio"] or report["range_ratio"]
    kind = (
        "95 % interval"
        if report["ci95_ratio"]
        else f"range; an interval needs at least {MIN_VALUES} rounds"
    )
    yield (
        "phases, steps and the log of communication change the time of a step by"
        f" {report['median_ratio'] - 1:+.2%} ({kind} {low - 1:+.2%} to {high - 1:+.2%})"
    )
    share = report["direct_s"] / report["median_step_s"]
    yield (
        f"measured by itself, this takes {1e6 * report['direct_s']:.3g} us per step, which is"
        f" {share:.2%} of the step"
    )
    if report["synthetic"]:
        yield "the data are synthetic"
