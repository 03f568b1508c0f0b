"""How much faster or cheaper runs get: with more ranks, and against the original benchmark."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from candle_p1.reports.compiled import compiled_apart
from candle_p1.reports.points import MIN_IN_RATIO, STRONG, WEAK, describe
from candle_p1.reports.published import METHOD_LOADER, ORIGINAL_LOADER
from candle_p1.reports.statistics import estimate_median, estimate_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.reports.points import Experiment, Point, Series
    from candle_p1.reports.runs import RecordedRun
    from candle_p1.reports.statistics import Estimate

    Number = Callable[[RecordedRun], float | None]

BASES = {"loader": (ORIGINAL_LOADER, METHOD_LOADER), "kernels": ("plain",)}
"""The settings of the paper, by name, in its order. A series that has them is the base of every
series that differs from it only in later ones, or in ones that the paper does not have."""

NO_METHOD_PAIR = (
    f"no two series differ only in the loader, one with {ORIGINAL_LOADER} and one with"
    f" {METHOD_LOADER}"
)
NO_OTHER_PAIR = (
    "no series with another loader or with fast kernels differs only in these from one with the"
    f" loader {ORIGINAL_LOADER} or {METHOD_LOADER}, or with plain kernels"
)
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

    @property
    def compiled_apart(self) -> str | None:
        """Which of the runs XLA compiled, in words; None where they do not differ in that."""
        return compiled_apart([*self.base.runs, *self.point.runs])


class Pair(NamedTuple):
    """Two series to compare.

    Attributes:
        base: The one with the settings of the paper.
        other: The one that may be faster.
    """

    base: Series
    other: Series

    @property
    def base_settings(self) -> str:
        """The loader and kernels of the base, as far as they differ among the series, in words."""
        settings = self.base.settings
        return describe({name: settings[name] for name in BASES if name in settings})

    @property
    def is_method(self) -> bool:
        """Whether this is the paper's own comparison: its way of loading against the original."""
        before, after = self.base.settings, self.other.settings
        loaders = before.get("loader"), after.get("loader")
        alike = before.get("kernels") == after.get("kernels")
        return loaders == (ORIGINAL_LOADER, METHOD_LOADER) and alike


@dataclass(frozen=True)
class Improvement:
    """What a series gains over its base.

    Attributes:
        num_ranks: The number of ranks; None for all together, by pairs of runs with the same
            number of ranks and the same seed.
        percent: 100 (base - other) / base.
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


def pairs(experiment: Experiment) -> list[Pair]:
    """Returns the series to compare."""
    return [
        Pair(base, other)
        for base in experiment.series
        for other in experiment.series
        if _is_pair(base, other)
    ]


def method_pairs(experiment: Experiment) -> list[Pair]:
    """Returns the series that show what the paper's method gains."""
    return [pair for pair in pairs(experiment) if pair.is_method]


def other_pairs(experiment: Experiment) -> list[Pair]:
    """Returns the series that show what other loaders, and kernels, gain."""
    return [pair for pair in pairs(experiment) if not pair.is_method]


def _is_pair(base: Series, other: Series) -> bool:
    before, after = base.settings, other.settings
    different = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return bool(different) and all(
        _comes_before(before.get(name), after.get(name), BASES.get(name, ())) for name in different
    )


def _comes_before(value: object, other: object, bases: Sequence[str]) -> bool:
    """Returns whether a value is a base, and the other one a later base or none."""
    return value in bases and other not in bases[: bases.index(str(value))]


def improvements(base: Series, optimised: Series, quantity: Number) -> list[Improvement]:
    """Returns the improvement on each number of ranks that both have, then that over all."""
    found = []
    for point in base.timed:
        other = optimised.at(point.num_ranks)
        before, after = point.positive(quantity), other.positive(quantity) if other else []
        if before and after:
            percent = _percent(estimate_ratio(after, before))
            found.append(Improvement(point.num_ranks, percent))
    ratios = _paired_ratios(base, optimised, quantity)
    if ratios:
        percent = _percent(estimate_median(ratios))
        found.append(Improvement(None, percent))
    return found


def _percent(ratio: Estimate) -> Estimate:
    return ratio.map(lambda factor: 100 * (1 - factor))


def _paired_ratios(base: Series, optimised: Series, quantity: Number) -> list[float]:
    """Returns optimised / base for runs with the same ranks and seed, in order of start."""
    before, after = _by_repeat(base, quantity), _by_repeat(optimised, quantity)
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
