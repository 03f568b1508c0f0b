"""How much faster or cheaper runs get: with more ranks, and against the original benchmark."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.reports.points import MIN_IN_RATIO, STRONG, WEAK
from candle_p1.reports.statistics import estimate_median, estimate_ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.reports.points import Experiment, Point, Series
    from candle_p1.reports.runs import RecordedRun
    from candle_p1.reports.statistics import Estimate

    Number = Callable[[RecordedRun], float | None]

ORIGINAL = {"loader": "original", "kernels": "plain"}
"""The settings of the paper's original benchmarks. A series that has them is the base of every
series that differs from it in nothing else."""

NO_PAIR = "no two series differ only in the loader or the kernels, with one using the original"
SIGNIFICANT, WORSE = "significant", "worse"


@dataclass(frozen=True)
class Speedup:
    """How much faster a point is than the base of its series.

    Attributes:
        base: The point of the series with the fewest ranks.
        point: Another point.
        base_s: The median time of the base, in s.
        speedup: T(base) / T(P).
        efficiency: Under strong scaling, the speed-up divided by the ratio of the numbers of ranks;
            under weak scaling T(base) / T(P), because the work grows with the ranks. None where the
            batch size grows as well, for which there is no ideal.
    """

    base: Point
    point: Point
    base_s: float
    speedup: Estimate
    efficiency: Estimate | None


@dataclass(frozen=True)
class Improvement:
    """What an optimised series gains over the original one.

    Attributes:
        num_ranks: The number of ranks; None for all together, by pairs of runs with the same
            number of ranks and the same seed.
        percent: 100 (original - optimised) / original.
    """

    num_ranks: int | None
    percent: Estimate

    @property
    def verdict(self) -> str:
        """SIGNIFICANT or WORSE if a 95 % interval excludes 0, else NOT_SIGNIFICANT or TOO_FEW."""
        return self.percent.claim(0, higher=SIGNIFICANT, lower=WORSE)


def speedups(experiment: Experiment, series: Series, quantity: Number) -> list[Speedup]:
    """Returns the speed-ups of a series in a time, by number of ranks, without the base itself."""
    known = [point for point in series.timed if point.positive(quantity)]
    found = []
    for point in known[1:]:
        base = known[0]
        ratio = estimate_ratio(base.positive(quantity), point.positive(quantity))
        base_s = estimate_median(base.positive(quantity)).value
        efficiency = _efficiency(experiment.mode, ratio, point.num_ranks / base.num_ranks)
        found.append(Speedup(base, point, base_s, ratio, efficiency))
    return found


def _efficiency(mode: str, ratio: Estimate, factor: float) -> Estimate | None:
    if mode == STRONG:
        return ratio.map(lambda speedup: speedup / factor)
    return ratio if mode == WEAK else None


def pairs(experiment: Experiment) -> list[tuple[Series, Series]]:
    """Returns the series to compare: an original one, and an optimised one."""
    return [
        (original, optimised)
        for original in experiment.series
        for optimised in experiment.series
        if _is_pair(original, optimised)
    ]


def _is_pair(original: Series, optimised: Series) -> bool:
    before, after = original.settings, optimised.settings
    different = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return bool(different) and all(
        before.get(name) == ORIGINAL.get(name, ...) for name in different
    )


def improvements(original: Series, optimised: Series, quantity: Number) -> list[Improvement]:
    """Returns the improvement on each number of ranks that both have, then that over all."""
    found = []
    for point in original.timed:
        other = optimised.at(point.num_ranks)
        before, after = point.positive(quantity), other.positive(quantity) if other else []
        if before and after:
            percent = _percent(estimate_ratio(after, before))
            found.append(Improvement(point.num_ranks, percent))
    ratios = _paired_ratios(original, optimised, quantity)
    if ratios:
        percent = _percent(estimate_median(ratios))
        found.append(Improvement(None, percent))
    return found


def _percent(ratio: Estimate) -> Estimate:
    return ratio.map(lambda factor: 100 * (1 - factor))


def _paired_ratios(original: Series, optimised: Series, quantity: Number) -> list[float]:
    """Returns optimised / original for runs with the same ranks and seed, in order of start."""
    before, after = _by_repeat(original, quantity), _by_repeat(optimised, quantity)
    return [
        new / old
        for key in before.keys() & after.keys()
        for new, old in zip(after[key], before[key], strict=False)
    ]


def _by_repeat(series: Series, quantity: Number) -> dict[tuple[int, int | None], list[float]]:
    values = defaultdict(list)
    for point in series.timed:
        for run in point.runs:
            value = quantity(run)
            if value is not None and value > MIN_IN_RATIO:
                values[point.num_ranks, run.seed].append(value)
    return values
