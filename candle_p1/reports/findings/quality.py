"""How many epochs per rank are needed, as far as the records show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.epochs import MATERIAL, epoch_groups, falls
from candle_p1.reports.findings.phrases import Inconclusive
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.published import published_epochs
from candle_p1.reports.quantities import (
    NOT_EVALUATED,
    merit,
    more_is_better,
    qualities,
)
from candle_p1.reports.words import interval, listed, number, percent
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.reports.epochs import Fall
    from candle_p1.reports.points import Experiment
    from candle_p1.reports.statistics import Estimate


def epochs_needed(experiment: Experiment) -> Iterator[str]:
    """Says whether quality is worse below the epochs per rank that the paper found necessary.

    Where the paper names no number, it is compared with that at the largest number of epochs.

    Raises:
        MissingDataError: No run was evaluated, models diverged, or runs with as many epochs or
            with fewer are missing.
    """
    name = merit(experiment.runs)
    if name is None:
        raise MissingDataError(NOT_EVALUATED)
    if experiment.limits:
        raise MissingDataError("the steps of the runs are limited")
    diverged = [run for run in experiment.runs if run.has_diverged(name)]
    if diverged:
        raise MissingDataError(
            f"the models of {count(len(diverged), 'run')} diverged (their {name} is not a number),"
            " and the others alone would look too good"
        )
    needed = published_epochs(experiment)
    lacking = []
    trained: set[int] = set()
    for quantity in qualities(name):
        for group in epoch_groups(experiment, quantity):
            label = f"{quantity.title} of {group.name}" if group.name else quantity.title
            enough = max(group.by_epochs) if needed is None else needed
            found = falls(group, enough, more_is_better(name))
            if not found:
                trained.update(group.by_epochs)
            elif not any(each.difference.is_confident for each in found):
                lacking.append(f"{label}: too few runs for a 95 % interval")
            else:
                verdict = _verdict(found, enough, more_is_better(name), is_told=bool(needed))
                is_open = isinstance(verdict, Inconclusive)
                yield Inconclusive(f"{label} {verdict}") if is_open else f"{label} {verdict}."
    if trained:
        enough_words = f"with {needed} epochs per rank or more" if needed else "with more epochs"
        lacking.append(
            f"this needs runs {enough_words} and otherwise identical runs with fewer; there are"
            f" runs with {listed(sorted(trained))}"
        )
    if lacking:
        raise MissingDataError("; ".join(lacking))


def _verdict(found: Sequence[Fall], enough: int, more_is_better: bool, *, is_told: bool) -> str:
    """Returns the result of a comparison with enough epochs, and whether the paper agrees."""
    falls, fall = ("falls", "fall") if more_is_better else ("rises", "rise")
    agrees, differs = (", as published", ", contrary to the paper") if is_told else ("", "")
    below = f"below {enough} epochs per rank"
    nearest = found[0]
    if nearest.material:
        return f"{falls} {below}{agrees}: at {nearest.epochs} by {_size(nearest)}"
    at_nearest = f"at {nearest.epochs}, the difference is {_words_of(nearest.difference)}"
    worse = [each for each in found if each.material]
    if worse:
        by = f"at {worse[0].epochs} by {_size(worse[0])}"
        if nearest.excluded:
            return f"{falls}, but not immediately {below}{differs}: {by}; {at_nearest}"
        return f"{falls} {below}{agrees}: {by}; {at_nearest}, which is inconclusive"
    least = found[-1]
    also = f"; at {least.epochs}, {_words_of(least.difference)}" if least is not nearest else ""
    if not all(each.excluded for each in found):
        return Inconclusive(f"may or may not {fall} {below}: {at_nearest}{also}")
    material = f"{MATERIAL}" if more_is_better else percent(MATERIAL)
    return f"does not {fall} by {material} or more {below}{differs}: {at_nearest}{also}"


def _size(fall: Fall) -> str:
    difference = fall.difference
    return _words_of(difference.map(lambda v: -v) if difference.value < 0 else difference)


def _words_of(difference: Estimate) -> str:
    return f"{number(difference.value)} ({interval(difference)})"
