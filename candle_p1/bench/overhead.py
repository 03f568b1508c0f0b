"""Finds what the measuring of a run costs: its phases, steps and log of communication."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.bench.job import run
from candle_p1.bench.measurement import Measurement, Starting, unheard
from candle_p1.bench.overhead_job import OverheadJob, OverheadOutcome
from candle_p1.benchmark import find_benchmark
from candle_p1.records import environment
from candle_p1.records.record import utc_now
from candle_p1.reports.statistics import MIN_VALUES, median_interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from candle_p1.data.reader import FileSet


@dataclass(frozen=True)
class OverheadMeasurement(Measurement):
    """What is measured, and under which conditions.

    Attributes:
        num_epochs: Epochs of a stretch.
        num_rounds: Rounds of a stretch with measuring and one without.
    """

    job = OverheadJob

    num_epochs: int = 10
    num_rounds: int = 30

    def measure(self, files: FileSet, starting: Starting = unheard) -> dict[str, Any]:
        """Runs the job; see Measurement."""
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
            "direct_s": max(outcome.direct_s for outcome in outcomes),
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
    share = report["direct_s"] / report["median_step_s"]
    taken_us = 1e6 * report["direct_s"]
    yield f"measured by itself it takes {taken_us:.3g} us of a step, {share:.2%} of it"
    if report["synthetic"]:
        yield "the data are synthetic"
