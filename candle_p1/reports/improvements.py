"""What an optimised series gains over the original one, in percent as the paper gives it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.reports.statistics import estimate_paired_ratio, estimate_ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.reports.points import Experiment, Series
    from candle_p1.reports.runs import RecordedRun
    from candle_p1.reports.statistics import Estimate

ORIGINAL = {"loader": "original", "kernels": "plain"}
"""The settings of the paper's original benchmarks; what differs from one that has them in nothing
else is compared with it."""

SHOWN, NOT_SHOWN, WORSE = "shown", "not shown", "worse"
TOO_FEW = "not shown: too few runs"


@dataclass(frozen=True)
class Improvement:
    """A gain.

    Attributes:
        original: The series that is compared with.
        optimised: The other.
        num_ranks: On so many ranks; None over all numbers of ranks together, by pairs of the same
            number and the same repeat.
        percent: 100 (original - optimised) / original.
    """

    original: Series
    optimised: Series
    num_ranks: int | None
    percent: Estimate

    @property
    def verdict(self) -> str:
        """SHOWN or WORSE where a 95 % interval excludes 0, else NOT_SHOWN or TOO_FEW."""
        if not self.percent.is_confident:
            return TOO_FEW
        if not self.percent.excludes(0):
            return NOT_SHOWN
        return SHOWN if self.percent.value > 0 else WORSE


def pairs(experiment: Experiment) -> list[tuple[Series, Series]]:
    """Returns the series to compare: an original one, and one that is optimised."""
    return [
        (original, optimised)
        for original in experiment.series
        for optimised in experiment.series
        if _is_pair(original, optimised)
    ]


def improvements(
    original: Series, optimised: Series, quantity: Callable[[RecordedRun], float | None]
) -> list[Improvement]:
    """Returns the improvement on each number of ranks that both have, then that over all."""
    found = []
    for point in original.timed:
        other = optimised.at(point.num_ranks)
        before = point.values(quantity)
        after = other.values(quantity) if other else []
        if before and after:
            percent = _percent(estimate_ratio(after, before))
            found.append(Improvement(original, optimised, point.num_ranks, percent))
    matched = _matched(original, optimised, quantity)
    if matched:
        percent = _percent(estimate_paired_ratio(matched))
        found.append(Improvement(original, optimised, None, percent))
    return found


def _percent(ratio: Estimate) -> Estimate:
    return ratio.map(lambda factor: 100 * (1 - factor))


def _is_pair(original: Series, optimised: Series) -> bool:
    before, after = original.settings, optimised.settings
    different = {
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    }
    return bool(different) and all(
        before.get(name) == ORIGINAL.get(name, ...) for name in different
    )


def _matched(
    original: Series, optimised: Series, quantity: Callable[[RecordedRun], float | None]
) -> list[tuple[float, float]]:
    """Returns (optimised, original) of the runs with the same ranks and seed, in order of start."""
    before, after = _by_repeat(original, quantity), _by_repeat(optimised, quantity)
    return [
        pair
        for key in before.keys() & after.keys()
        for pair in zip(after[key], before[key], strict=False)
    ]


def _by_repeat(
    series: Series, quantity: Callable[[RecordedRun], float | None]
) -> dict[tuple[int, int | None], list[float]]:
    values = defaultdict(list)
    for point in series.timed:
        for run in point.runs:
            value = quantity(run)
            if value is not None:
                values[point.num_ranks, run.seed].append(value)
    return values
