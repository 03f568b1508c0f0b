"""Which loader, batch scaling or other setting is fastest, and which gives the best quality."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from candle_p1.reports.epochs import about_quality, of_each_seed
from candle_p1.reports.findings.phrases import Inconclusive, on_ranks
from candle_p1.reports.loading import file_loads, largest_files
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.points import BATCH, MIN_IN_RATIO, describe
from candle_p1.reports.published import METHOD_LOADER, ORIGINAL_LOADER
from candle_p1.reports.quantities import (
    TOTAL,
    known_values,
    merit,
    more_is_better,
    quality_on_test,
)
from candle_p1.reports.statistics import estimate_difference, estimate_ratio
from candle_p1.reports.words import interval, number
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from candle_p1.reports.loading import FileLoad
    from candle_p1.reports.points import Experiment
    from candle_p1.reports.quantities import Quantity
    from candle_p1.reports.runs import RecordedRun
    from candle_p1.reports.statistics import Estimate

PAPER_LOADERS = (ORIGINAL_LOADER, METHOD_LOADER)
COMPARED_ELSEWHERE = {"loader", "load_threads", "staged", "kernels", "epochs"}


def batch_strategies(experiment: Experiment) -> Iterator[str]:
    """Says which scaling of the batch size is best and which is fastest, at each scale.

    Raises:
        MissingDataError: All runs used the same one.
    """
    if experiment.mode != BATCH or "batch_scaling" not in experiment.varied:
        raise MissingDataError("no runs differ in --batch_scaling")
    for num_ranks in experiment.rank_counts:
        if num_ranks > 1:
            yield from _best_and_fastest(experiment, num_ranks)


def other_settings(experiment: Experiment) -> Iterator[str]:
    """Says which series is fastest and which is best on the most ranks, where others vary.

    Raises:
        MissingDataError: No other setting varies.
    """
    elsewhere = COMPARED_ELSEWHERE | ({"batch_scaling"} if experiment.mode == BATCH else set())
    if elsewhere.issuperset(experiment.varied):
        raise MissingDataError("no other setting was varied")
    yield from _best_and_fastest(experiment, experiment.rank_counts[-1])


def method_loading(experiment: Experiment) -> Iterator[str]:
    """Says how much faster the paper's loader reads the largest file than the original one.

    Raises:
        MissingDataError: One of the two was not used.
    """
    if not experiment.loaders.issuperset(PAPER_LOADERS):
        raise MissingDataError(f"no runs used --loader {' and '.join(PAPER_LOADERS)}")
    yield from _loading(experiment, ORIGINAL_LOADER, {METHOD_LOADER})


def other_loading(experiment: Experiment) -> Iterator[str]:
    """Says how much faster other loaders read the largest file than the paper's two.

    Raises:
        MissingDataError: No run used another loader, or none used one of the paper's.
    """
    others = experiment.loaders.difference(PAPER_LOADERS)
    if not others:
        raise MissingDataError("no run used another loader than the paper's")
    if experiment.loaders.isdisjoint(PAPER_LOADERS):
        raise MissingDataError(f"no run used --loader {' or '.join(PAPER_LOADERS)}")
    for base in PAPER_LOADERS:
        yield from _loading(experiment, base, others)


def _loading(experiment: Experiment, base: str, others: Collection[str]) -> Iterator[str]:
    """Says how some loaders compare with one, on the fewest and on the most ranks."""
    loads = file_loads(experiment, experiment.series)
    for alike in dict.fromkeys(load.alike for load in loads):
        of_files = [load for load in loads if load.alike == alike]
        (largest,) = largest_files(of_files, 1)
        of_file = [load for load in of_files if (load.role, load.file_mb) == largest]
        counts = sorted({load.num_ranks for load in of_file})
        for num_ranks in dict.fromkeys((counts[0], counts[-1])):
            alike_runs = [load for load in of_file if load.num_ranks == num_ranks]
            first = next((load for load in alike_runs if load.loader == base), None)
            compared = [load for load in alike_runs if load.loader in others]
            if first and compared:
                yield from _against(first, compared)


def _against(base: FileLoad, others: Sequence[FileLoad]) -> Iterator[str]:
    """Says how loads of one file on one number of ranks compare with another one."""
    words = (
        f"{on_ranks([base.num_ranks])}, loading the {base.role} file ({number(base.file_mb)} MB)"
        f" takes {number(base.estimate.value)} s with {base.method}"
    )
    ratios = {load.method: estimate_ratio(base.seconds, load.seconds) for load in others}
    sure = [_factor(method, ratio) for method, ratio in ratios.items() if ratio.excludes(1)]
    unsure = [_factor(method, ratio) for method, ratio in ratios.items() if not ratio.excludes(1)]
    if sure:
        yield f"{words}; {', '.join(sure)}."
    if unsure:
        yield Inconclusive(f"{words}; {', '.join(unsure)}")


def _factor(method: str, ratio: Estimate) -> str:
    word = "faster"
    if ratio.value < 1:
        ratio, word = ratio.map(lambda factor: 1 / factor), "slower"
    return f"{method} is {word} by a factor of {number(ratio.value)} ({interval(ratio)})"


def _best_and_fastest(experiment: Experiment, num_ranks: int) -> Iterator[str]:
    name = merit(experiment.runs)
    if name and not experiment.limits:
        better = more_is_better(name)
        yield from _first(experiment, num_ranks, quality_on_test(name), better, "the best")
    yield from _first(experiment, num_ranks, TOTAL, False, "the shortest")


def _first(
    experiment: Experiment, num_ranks: int, quantity: Quantity, more: bool, word: str
) -> Iterator[str]:
    """Yields which series is first on a number of ranks, and how far ahead of the next."""
    runs_of: dict[str, list[RecordedRun]] = {}
    for series in experiment.series:
        point = series.at(num_ranks)
        name = series.name if quantity is TOTAL else describe(about_quality(series.settings))
        if point is not None:
            runs_of.setdefault(name, []).extend(point.runs)
    values = _positive if quantity is TOTAL else of_each_seed
    values_of = {name: values(runs, quantity) for name, runs in runs_of.items()}
    known = [(median(values), name, values) for name, values in values_of.items() if values]
    if len(known) < 2:
        return
    known.sort(key=lambda each: each[0], reverse=more)
    (value, first, values_first), (next_value, second, values_second) = known[:2]
    if quantity is TOTAL:
        by, same, ahead = "factor", 1, estimate_ratio(values_second, values_first)
    else:
        by, same, ahead = "difference", 0, estimate_difference(values_first, values_second)
    unit = f" {quantity.unit}" if quantity.unit else ""
    num_without = sum(quantity.of(run) is None for runs in runs_of.values() for run in runs)
    without = f" Left out: {count(num_without, 'run')} without a number." if num_without else ""
    words = (
        f"{on_ranks([num_ranks])}, {first} has {word} {quantity.title}, {number(value)}{unit}; the"
        f" next is {second} with {number(next_value)}{unit}, a {by} of {number(ahead.value)}"
        f" ({interval(ahead)})"
    )
    yield f"{words}.{without}" if ahead.excludes(same) else Inconclusive(words)


def _positive(runs: Sequence[RecordedRun], quantity: Quantity) -> list[float]:
    return [value for value in known_values(runs, quantity) if value > MIN_IN_RATIO]
