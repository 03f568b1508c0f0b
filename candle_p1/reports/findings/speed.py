"""How total time and time per epoch scale, and what optimised series gain over the original."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.findings.phrases import limited, on_ranks
from candle_p1.reports.gains import NO_PAIR, NOT_SHOWN, WORSE, improvements, pairs, speedups
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.points import STRONG
from candle_p1.reports.quantities import ENERGY, EPOCH, TOTAL, covered, labelled
from candle_p1.reports.words import interval, number

if TYPE_CHECKING:
    from candle_p1.reports.gains import Improvement
    from candle_p1.reports.points import Experiment
    from candle_p1.reports.quantities import Quantity
    from candle_p1.reports.statistics import Estimate

ONE_SCALE = "no series was run on two numbers of ranks"


def speed(experiment: Experiment) -> list[str]:
    """Says how much faster the runs on the most ranks are than those on the fewest.

    Raises:
        MissingDataError: No series was run on two numbers of ranks.
    """
    what = "speed-up" if experiment.mode == STRONG else "T(base) / T(P)"
    sentences = []
    for series in experiment.series:
        for last in speedups(experiment, series, TOTAL.of)[-1:]:
            efficiency, base = "", on_ranks([last.base.num_ranks])
            if last.efficiency is not None:
                efficiency = f", an efficiency of {number(last.efficiency.value)}"
            if last.base.num_ranks != 1:
                base += ", because there is no run on 1 rank"
            sentences.append(
                f"{series.name}: {on_ranks([last.point.num_ranks])}, the {what} of the total time"
                f" is {number(last.speedup.value)} ({interval(last.speedup)}){efficiency}, relative"
                f" to {number(last.base_s)} s {base}.{_claim(last.speedup)}"
            )
    if not sentences:
        raise MissingDataError(ONE_SCALE)
    return limited(sentences)


def epoch_growth(experiment: Experiment) -> list[str]:
    """Says how the time per epoch changes with the number of ranks.

    Raises:
        MissingDataError: No series was run on two numbers of ranks.
    """
    sentences = []
    for series in experiment.series:
        for last in speedups(experiment, series, EPOCH.of)[-1:]:
            growth = last.speedup.map(lambda ratio: 1 / ratio)
            sentences.append(
                f"{series.name}: {on_ranks([last.point.num_ranks])}, an epoch takes"
                f" {number(growth.value)} times as long ({interval(growth)}) as the"
                f" {number(last.base_s)} s {on_ranks([last.base.num_ranks])}.{_claim(growth)}"
            )
    if not sentences:
        raise MissingDataError(ONE_SCALE)
    return limited(sentences)


def _claim(ratio: Estimate) -> str:
    """Returns what to add where a 95 % interval includes 1."""
    return " A change is not shown." if ratio.is_confident and not ratio.excludes(1) else ""


def time_gain(experiment: Experiment) -> list[str]:
    """Says by how much the optimised series improve the total time.

    Raises:
        MissingDataError: There is nothing to compare.
    """
    return _gain(experiment, TOTAL)


def energy_gain(experiment: Experiment) -> list[str]:
    """Says by how much the optimised series improve the energy.

    Raises:
        MissingDataError: It was not measured, or there is nothing to compare.
    """
    parts = covered(experiment.runs)
    if not parts:
        raise MissingDataError("energy was not measured in any run")
    if len(parts) > 1:
        raise MissingDataError(f"energies cover different parts of the machine: {'; '.join(parts)}")
    return _gain(experiment, labelled(ENERGY, experiment.runs))


def _gain(experiment: Experiment, quantity: Quantity) -> list[str]:
    compared = pairs(experiment)
    if not compared:
        raise MissingDataError(NO_PAIR)
    sentences = []
    for original, optimised in compared:
        found = improvements(original, optimised, quantity.of)
        counted = [each for each in found if each.num_ranks is not None]
        if counted:
            parts = [
                f"{_words(each, 'pair')} over all numbers of ranks"
                for each in found
                if each.num_ranks is None
            ]
            best = max(counted, key=lambda each: each.percent.value)
            where = on_ranks([best.num_ranks or 0])
            best_words = _words(best, "run")
            parts.append(
                f"at best, {where}, {best_words}" if len(counted) > 1 else f"{where}, {best_words}"
            )
            sentences.append(
                f"{quantity.title} of {optimised.name} compared with {original.name}:"
                f" {'; '.join(parts)}."
            )
    if not sentences:
        raise MissingDataError(
            f"no original and optimised runs with {quantity.title} on the same number of ranks"
        )
    return limited(sentences)


def _words(gain: Improvement, of: str) -> str:
    claim = {WORSE: ": it is worse", NOT_SHOWN: ": an improvement is not shown"}
    verb, percent = "improved", gain.percent
    if percent.value < 0:
        verb, percent = "worsened", percent.map(lambda value: -value)
    said = f"{interval(percent, of=of)}{claim.get(gain.verdict, '')}"
    return f"{verb} by {number(percent.value)} % ({said})"
