"""The epochs of a training run: their times, their steps and their parallel efficiency."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.instrument.efficiency import efficiencies
from candle_p1.records.spread import Seconds
from candle_p1.records.types import EpochFacts, StepTimes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Epoch:
    """The training part of an epoch on one rank.

    Attributes:
        begin_s: When it began, in s from the start of the run.
        seconds: How long it took.
        steps_s: The time of each step, in s, from its beginning to that of the next.
        first_step: The step, from 0, in which the framework compiles because it is the first one of
            this process; None: it is not in this epoch.
        exposed_s: The part of `seconds` in which this rank waited for gradient allreduces that
            back-propagation did not hide; 0 on one rank; None if it was not measured.
        allreduce_s: The time in which any gradient allreduce was in progress, hidden or not; 0 or
            None as for `exposed_s`.
    """

    begin_s: float
    seconds: float
    steps_s: Sequence[float]
    exposed_s: float | None = 0.0
    allreduce_s: float | None = 0.0
    first_step: int | None = None

    def after(self, earlier: Epoch) -> Epoch:
        """Returns the whole epoch if an earlier part of the run has trained its first steps."""
        return replace(
            self,
            seconds=earlier.seconds + self.seconds,
            steps_s=[*earlier.steps_s, *self.steps_s],
            exposed_s=sum_of_known([earlier.exposed_s, self.exposed_s]),
            allreduce_s=sum_of_known([earlier.allreduce_s, self.allreduce_s]),
            first_step=None if self.first_step is None else len(earlier.steps_s) + self.first_step,
        )


def sum_of_known(times_s: Sequence[float | None]) -> float | None:
    """Returns the sum of times; None if one of them is not known."""
    known = [seconds for seconds in times_s if seconds is not None]
    return sum(known) if len(known) == len(times_s) else None


def summarize_epoch(
    epoch: int,
    of_ranks: Sequence[Epoch],
    metrics: Mapping[str, float | None],
    validation_s: Sequence[float] | None = None,
    part: int | None = None,
) -> EpochFacts:
    """Returns an epoch as a run record holds it.

    Args:
        epoch: Its number, from 1.
        of_ranks: The epoch on each rank. A first step, in which the framework compiles, is reported
            separately.
        metrics: The metrics over all ranks, by name.
        validation_s: The time of its validation on each rank.
        part: The part of a continued run that ended it, from 1; None: the run has only one.
    """
    facts: dict[str, Any] = {} if part is None else {"part": part}
    if validation_s is not None:
        facts["validation"] = Seconds.over(validation_s)
    exposed = [each.exposed_s for each in of_ranks if each.exposed_s is not None]
    allreduce = [each.allreduce_s for each in of_ranks if each.allreduce_s is not None]
    if len(exposed) == len(allreduce) == len(of_ranks):
        facts["exposed_communication"] = Seconds.over(exposed)
        if any(allreduce):
            facts["allreduce"] = Seconds.over(allreduce)
            facts["hidden_share"] = 1 - sum(exposed) / sum(allreduce)
        useful = [each.seconds - seconds for each, seconds in zip(of_ranks, exposed, strict=True)]
        facts["efficiency"] = efficiencies(useful, max(each.seconds for each in of_ranks))
    return EpochFacts(
        epoch=epoch,
        metrics=dict(metrics),
        train=Seconds.over([each.seconds for each in of_ranks]),
        begin=Seconds.over([each.begin_s for each in of_ranks]),
        steps=_summarize_steps([each.steps_s for each in of_ranks], of_ranks[0].first_step),
        **facts,
    )


def _summarize_steps(of_ranks: Sequence[Sequence[float]], first: int | None) -> StepTimes:
    """Returns the number of steps, their median and 99th percentile; `first` separately."""
    num, facts = max(len(steps) for steps in of_ranks), {}
    if first is not None and num:
        facts["first"] = Seconds.over([steps[first] for steps in of_ranks])
        of_ranks = [[*steps[:first], *steps[first + 1 :]] for steps in of_ranks]
    if all(of_ranks):
        median, p99 = np.percentile(np.array(of_ranks), (50, 99), axis=1)
        facts |= {"median": Seconds.over(median), "p99": Seconds.over(p99)}
    return StepTimes(num=num, **facts)
