"""How total time and time per epoch change with the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.findings.statement import MAX_SENTENCES, others, workers
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.points import STRONG
from candle_p1.reports.quantities import EPOCH, TOTAL
from candle_p1.reports.speedups import speedups
from candle_p1.reports.statistics import estimate_ratio
from candle_p1.reports.words import interval, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from candle_p1.reports.points import Experiment
    from candle_p1.reports.statistics import Estimate


def speed(experiment: Experiment) -> Iterator[str]:
    """Says how much faster the most workers are than the fewest.

    Raises:
        MissingDataError: No series was run on two numbers of workers.
    """
    found = [
        of_series[-1]
        for series in experiment.series
        if (of_series := speedups(experiment, series, TOTAL.of))
    ]
    if not found:
        raise MissingDataError("no series was run on two numbers of workers")
    what = "speed-up" if experiment.mode == STRONG else "T(base) / T(P)"
    for each in found[:MAX_SENTENCES]:
        efficiency = ""
        if each.efficiency is not None:
            efficiency = f", an efficiency of {number(each.efficiency.value)}"
        base = workers([each.base.num_ranks])
        if each.base.num_ranks != 1:
            base += ", as there is no run on 1 worker"
        claim = _claim(each.speedup)
        yield (
            f"{each.series.name}: on {workers([each.point.num_ranks])} the {what} of the total"
            f" time is {number(each.speedup.value)} ({interval(each.speedup)}){efficiency}, against"
            f" {number(each.base_s)} s on {base}.{claim}"
        )
    yield from others(len(found))


def epoch_growth(experiment: Experiment) -> Iterator[str]:
    """Says how the time per epoch changes with the workers.

    Raises:
        MissingDataError: No series was run on two numbers of workers.
    """
    told = 0
    for series in experiment.series:
        known = [point for point in series.timed if point.values(EPOCH.of)]
        if len(known) < 2:
            continue
        told += 1
        if told > MAX_SENTENCES:
            continue
        first, last = known[0], known[-1]
        ratio = estimate_ratio(last.values(EPOCH.of), first.values(EPOCH.of))
        start = first.estimate(EPOCH.of)
        assert start is not None  # it has values
        claim = _claim(ratio)
        yield (
            f"{series.name}: an epoch takes {number(ratio.value)} times as long on"
            f" {workers([last.num_ranks])} ({interval(ratio)}) as the {number(start.value)} s on"
            f" {workers([first.num_ranks])}.{claim}"
        )
    if not told:
        raise MissingDataError("no series was run on two numbers of workers")
    yield from others(told)


def _claim(ratio: Estimate) -> str:
    """Returns what to add where the interval is one of 95 % and holds 1."""
    return " A change is not shown." if ratio.is_confident and not ratio.excludes(1) else ""
