"""What the optimised series gain over the original ones, in time and in energy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.findings.statement import MAX_SENTENCES, others, workers
from candle_p1.reports.improvements import NOT_SHOWN, WORSE, improvements, pairs
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.quantities import ENERGY, TOTAL, covered, labelled
from candle_p1.reports.words import interval, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from candle_p1.reports.improvements import Improvement
    from candle_p1.reports.points import Experiment
    from candle_p1.reports.quantities import Quantity


def time_gain(experiment: Experiment) -> Iterator[str]:
    """Says by how much the optimised series improve the total time."""
    yield from _gain(experiment, TOTAL)


def energy_gain(experiment: Experiment) -> Iterator[str]:
    """Says by how much the optimised series improve the energy.

    Raises:
        MissingDataError: It was not measured, or there is nothing to compare.
    """
    if not any(ENERGY.of(run) for run in experiment.runs):
        raise MissingDataError(f"energy was measured in none of {len(experiment.runs)} runs")
    parts = covered(experiment.runs)
    if len(parts) > 1:
        raise MissingDataError(
            f"energies are of different parts of the machine: {'; '.join(parts)}"
        )
    yield from _gain(experiment, labelled(ENERGY, experiment.runs))


def _gain(experiment: Experiment, quantity: Quantity) -> Iterator[str]:
    compared = pairs(experiment)
    if not compared:
        raise MissingDataError(
            "no two series differ in the loader or the kernels alone, one of them the original"
        )
    told = 0
    for original, optimised in compared:
        found = improvements(original, optimised, quantity.of)
        over_all = [each for each in found if each.num_ranks is None]
        counted = [each for each in found if each.num_ranks is not None]
        if not counted:
            continue
        told += 1
        if told > MAX_SENTENCES:
            continue
        best = max(counted, key=lambda each: each.percent.value)
        parts = [f"over all numbers of workers {_words(each, 'pair')}" for each in over_all]
        most = "the most " if len(counted) > 1 else ""
        parts.append(f"{most}on {workers([best.num_ranks or 0])}, {_words(best, 'run')}")
        yield f"{quantity.title} of {optimised.name} against {original.name}: {'; '.join(parts)}."
    if not told:
        raise MissingDataError(
            f"no original and optimised runs with {quantity.title} on the same number of workers"
        )
    yield from others(told)


def _words(gain: Improvement, of: str) -> str:
    claim = {WORSE: ": it is worse", NOT_SHOWN: ": an improvement is not shown"}
    verb, percent = "improved", gain.percent
    if percent.value < 0:
        verb, percent = "worsened", percent.map(lambda value: -value)
    said = f"{interval(percent, of=of)}{claim.get(gain.verdict, '')}"
    return f"{verb} by {number(percent.value)} % ({said})"
