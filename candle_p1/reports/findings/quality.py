"""How many epochs a worker needs, as far as the records show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.published import published
from candle_p1.reports.epochs import MATERIAL, epoch_groups, falls
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.quantities import merit, more_is_better, quality_on_test, quality_on_training
from candle_p1.reports.words import interval, listed, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.reports.epochs import Fall
    from candle_p1.reports.points import Experiment
    from candle_p1.statistics import Estimate


def epochs_needed(experiment: Experiment) -> Iterator[str]:
    """Says whether quality falls below the epochs per worker that the paper found to be needed.

    Raises:
        MissingDataError: The paper names no number, no run was evaluated, or runs with as many
            epochs or with fewer are missing.
    """
    told = published(experiment.benchmark, experiment.mode, "epochs_needed")
    if not told:
        raise MissingDataError("the paper names no number of epochs for this")
    enough = int(told[0].value or 0)
    name = merit(experiment.runs)
    if name is None:
        raise MissingDataError("no run evaluated its model (--eval_bool False)")
    lacking = []
    trained: set[int] = set()
    for quantity in (quality_on_training(name), quality_on_test(name)):
        for group in epoch_groups(experiment, quantity):
            label = f"{quantity.title} of {group.name}" if group.name else quantity.title
            found = falls(group, enough, more_is_better(name))
            if not found:
                trained.update(group.by_epochs)
            elif not any(each.difference.is_confident for each in found):
                lacking.append(f"{label}: too few runs for a 95 % interval")
            else:
                yield f"{label} {_words(found, enough)}."
    if trained:
        lacking.append(
            f"runs with {enough} epochs per worker or more and runs with fewer, alike in all else,"
            f" are needed; there are such with {listed(sorted(trained))}"
        )
    if lacking:
        raise MissingDataError("; ".join(lacking))


def _words(found: Sequence[Fall], enough: int) -> str:
    """Returns what a comparison with enough epochs says; the paper has the quality fall below."""
    nearest = found[0]
    if nearest.material:
        return (
            f"falls below {enough} epochs per worker, as published: at {nearest.epochs} it is worse"
            f" by {_size(nearest)}"
        )
    worse = [each for each in found if each.material]
    if worse:
        return (
            f"falls, but not right below {enough} epochs per worker as published: at"
            f" {nearest.epochs} the difference is {_signed(nearest)}; at {worse[0].epochs} it is"
            f" worse by {_size(worse[0])}"
        )
    least = found[-1]
    also = f"; at {least.epochs} it is {_signed(least)}" if least is not nearest else ""
    told = f"at {nearest.epochs} the difference is {_signed(nearest)}{also}"
    if not all(each.excluded for each in found):
        return f"is not shown to fall below {enough} epochs per worker, nor not to: {told}"
    return (
        f"does not fall below {enough} epochs per worker by the {MATERIAL} that would count, other"
        f" than published: {told}"
    )


def _size(fall: Fall) -> str:
    return _words_of(fall.difference.map(lambda value: -value))


def _signed(fall: Fall) -> str:
    return _words_of(fall.difference)


def _words_of(difference: Estimate) -> str:
    return f"{number(difference.value)} ({interval(difference)})"
