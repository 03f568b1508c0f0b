"""How total time and time per epoch scale, and what series gain over those of the paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.findings.phrases import (
    Inconclusive,
    at_scale,
    gained,
    limited,
    on_ranks,
    significant,
)
from candle_p1.reports.gains import (
    NO_METHOD_PAIR,
    NO_OTHER_PAIR,
    improvements,
    method_pairs,
    other_pairs,
    speedups,
)
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.points import STRONG
from candle_p1.reports.quantities import ENERGY, EPOCH, TOTAL, covered, labelled
from candle_p1.reports.words import interval, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.reports.gains import Pair, Speedup
    from candle_p1.reports.points import Experiment
    from candle_p1.reports.quantities import Quantity
    from candle_p1.reports.statistics import Estimate


def speed(experiment: Experiment) -> list[str]:
    """Says how much faster the runs on the most ranks are than those on the fewest.

    Raises:
        MissingDataError: No series was run on two numbers of ranks.
    """
    what = "speed-up" if experiment.mode == STRONG else "T(base) / T(P)"
    sentences = []
    for name, last in _on_most_ranks(experiment, TOTAL):
        efficiency, base = "", on_ranks([last.base.num_ranks])
        if last.efficiency is not None:
            efficiency = f", a scaling efficiency of {number(last.efficiency.value)}"
        if last.base.num_ranks != 1:
            base += ", because there is no run on 1 rank"
        sentences.append(
            _told(
                last.speedup,
                f"{name}: {on_ranks([last.point.num_ranks])}, the {what} of the total time is"
                f" {number(last.speedup.value)} ({interval(last.speedup)}){efficiency}, relative to"
                f" {number(last.base_s)} s {base}{_compiled(last)}",
            )
        )
    return limited(sentences)


def epoch_growth(experiment: Experiment) -> list[str]:
    """Says how the time per epoch changes with the number of ranks.

    Raises:
        MissingDataError: No series was run on two numbers of ranks.
    """
    sentences = []
    for name, last in _on_most_ranks(experiment, EPOCH):
        growth = last.speedup.map(lambda ratio: 1 / ratio)
        sentences.append(
            _told(
                growth,
                f"{name}: {on_ranks([last.point.num_ranks])}, an epoch takes"
                f" {number(growth.value)} times as long ({interval(growth)}) as the"
                f" {number(last.base_s)} s {on_ranks([last.base.num_ranks])}{_compiled(last)}",
            )
        )
    return limited(sentences)


def _on_most_ranks(experiment: Experiment, quantity: Quantity) -> list[tuple[str, Speedup]]:
    """Returns the names of series with their last speed-ups."""
    of_series = ((each.name, speedups(experiment, each, quantity.of)) for each in experiment.series)
    last = [(name, found[-1]) for name, found in of_series if found]
    if not last:
        raise MissingDataError("no series was run on two numbers of ranks")
    return last


def _compiled(last: Speedup) -> str:
    return f"; {last.compiled_apart}" if last.compiled_apart else ""


def _told(ratio: Estimate, words: str) -> str:
    """Returns a sentence where a 95 % interval of a ratio excludes 1, or what is inconclusive."""
    return f"{words}." if ratio.excludes(1) else Inconclusive(words)


def method_time(experiment: Experiment) -> list[str]:
    """Says by how much the paper's loading improves the total time.

    Raises:
        MissingDataError: There is nothing to compare.
    """
    return _gain(TOTAL, method_pairs(experiment), NO_METHOD_PAIR)


def other_time(experiment: Experiment) -> list[str]:
    """Says by how much other loaders, and kernels, improve the total time.

    Raises:
        MissingDataError: There is nothing to compare.
    """
    return _gain(TOTAL, other_pairs(experiment), NO_OTHER_PAIR)


def method_energy(experiment: Experiment) -> list[str]:
    """Says by how much the paper's loading improves the energy.

    Raises:
        MissingDataError: It was not measured, or there is nothing to compare.
    """
    return _gain(_energy(experiment), method_pairs(experiment), NO_METHOD_PAIR)


def other_energy(experiment: Experiment) -> list[str]:
    """Says by how much other loaders, and kernels, improve the energy.

    Raises:
        MissingDataError: It was not measured, or there is nothing to compare.
    """
    return _gain(_energy(experiment), other_pairs(experiment), NO_OTHER_PAIR)


def _energy(experiment: Experiment) -> Quantity:
    """Returns the energy, if that of all runs can be compared."""
    parts = covered(experiment.runs)
    if not parts:
        raise MissingDataError("energy was not measured in any run")
    if len(parts) > 1:
        raise MissingDataError(f"energies cover different parts of the machine: {'; '.join(parts)}")
    return labelled(ENERGY, experiment.runs)


def _gain(quantity: Quantity, pairs: Sequence[Pair], without: str) -> list[str]:
    if not pairs:
        raise MissingDataError(without)
    sentences = []
    for pair in pairs:
        found = improvements(*pair, quantity.of)
        if found:
            words = f"{quantity.title} of {pair.other.name} compared with {pair.base.name}"
            sure = significant(found)
            together = [each for each in sure or found if each.num_ranks is None]
            alone = [each for each in sure or found if each.num_ranks]
            best = sorted(alone, key=lambda each: each.percent.value)[-1:]
            at_best = "at best, " if len(alone) > 1 else ""
            parts = [f"{gained(each)} {at_scale(each)}" for each in together]
            parts += [f"{at_best}{gained(each)} {at_scale(each)}" for each in best]
            told = f"{words}: {'; '.join(parts)}"
            sentences.append(f"{told}." if sure else Inconclusive(told))
    if not sentences:
        raise MissingDataError(
            f"the series to compare have no runs with {quantity.title} on the same number of ranks"
        )
    return limited(sentences)
