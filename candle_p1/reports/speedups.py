"""Speed-up and scaling efficiency of a series, against its smallest number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.reports.points import STRONG, WEAK
from candle_p1.reports.statistics import estimate_ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.reports.points import Experiment, Point, Series
    from candle_p1.reports.runs import RecordedRun
    from candle_p1.reports.statistics import Estimate


@dataclass(frozen=True)
class Speedup:
    """How much faster a point is than the base of its series.

    Attributes:
        series: Whose points these are.
        base: The point with the fewest ranks; the base of a speed-up is 1 rank where there is it.
        point: Another one.
        base_s: The base's median time, in s.
        speedup: T(base) / T(P).
        efficiency: Under strong scaling the speed-up by the ratio of the numbers of ranks; under
            weak scaling T(base) / T(P), since the work grows with the ranks; None where the batch
            size grows, too, for which there is no ideal.
    """

    series: Series
    base: Point
    point: Point
    base_s: float
    speedup: Estimate
    efficiency: Estimate | None


def speedups(
    experiment: Experiment, series: Series, quantity: Callable[[RecordedRun], float | None]
) -> list[Speedup]:
    """Returns the speed-ups of a series in a time, by number of ranks, without the base itself."""
    known = [point for point in series.timed if point.values(quantity)]
    found = []
    for point in known[1:]:
        base = known[0]
        base_median = base.estimate(quantity)
        assert base_median is not None  # it has values
        ratio = estimate_ratio(base.values(quantity), point.values(quantity))
        efficiency = _efficiency(experiment.mode, ratio, point.num_ranks / base.num_ranks)
        found.append(Speedup(series, base, point, base_median.value, ratio, efficiency))
    return found


def _efficiency(mode: str, ratio: Estimate, factor: float) -> Estimate | None:
    if mode == STRONG:
        return ratio.map(lambda speedup: speedup / factor)
    return ratio if mode == WEAK else None
