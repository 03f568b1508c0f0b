"""The epochs of a training run: their times, their steps and their parallel efficiency."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.records.rank_stats import Seconds
from candle_p1.records.types import Efficiency, EpochRecord, StepTimes


@dataclass(frozen=True)
class Epoch:
    """The training part of an epoch on one rank; see `candle_p1.records.types.EpochRecord`.

    `first_step` is the index in `steps_s` of the step in which the framework compiles because it is
    the first one of this process, if it is in this epoch. `num_earlier` are the steps before, which
    an earlier segment of the run trained, and whose times are known in total only.
    """

    begin_s: float  # from the start of the run
    seconds: float
    steps_s: Sequence[float]  # of each step, from its beginning to that of the next
    exposed_s: float | None = 0.0  # None if it was not measured
    allreduce_s: float | None = 0.0  # likewise
    first_step: int | None = None
    num_earlier: int = 0

    @property
    def num_steps(self) -> int:
        """The number of its steps, with the earlier ones."""
        return self.num_earlier + len(self.steps_s)

    def after(self, earlier: Epoch) -> Epoch:
        """Returns the whole epoch if an earlier segment of the run has trained its first steps.

        The times of single steps remain those of the later segment.
        """
        return replace(
            self,
            seconds=earlier.seconds + self.seconds,
            exposed_s=sum_of_known([earlier.exposed_s, self.exposed_s]),
            allreduce_s=sum_of_known([earlier.allreduce_s, self.allreduce_s]),
            num_earlier=earlier.num_steps + self.num_earlier,
        )

    def summarize(self, validation_s: float | None = None) -> NDArray[np.float64]:
        """Returns the values of `EpochSummary`, float64, NaN for those that are not known."""
        steps_s, first_s = list(self.steps_s), None
        if self.first_step is not None and steps_s:
            first_s = steps_s.pop(self.first_step)
        median_s, p99_s = np.percentile(steps_s, (50, 99)) if steps_s else (None, None)
        times_s = self.begin_s, self.seconds, self.exposed_s, self.allreduce_s, validation_s
        return np.array(
            EpochSummary(*times_s, self.num_steps, first_s, median_s, p99_s), np.float64
        )


EpochSummary = namedtuple(
    "EpochSummary",
    "begin_s seconds exposed_s allreduce_s validation_s num_steps first_step_s median_step_s"
    " p99_step_s",
)
"""An epoch on one rank or, with arrays as values, on each of several ranks; see `Epoch`. The first
step is that in which the framework compiles; median and 99th percentile are over the others."""


def sum_of_known(times_s: Sequence[float | None]) -> float | None:
    """Returns the sum of times; None if one of them is not known."""
    known = [seconds for seconds in times_s if seconds is not None]
    return sum(known) if len(known) == len(times_s) else None


def summarize_epoch(
    epoch: int,
    of_ranks: Sequence[NDArray[np.float64]] | NDArray[np.float64],
    metrics: Mapping[str, float | None],
    segment: int | None = None,
) -> EpochRecord:
    """Returns an epoch, by its number from 1, as a run record holds it.

    `of_ranks` is what `Epoch.summarize` returned on each rank. The segment is that of a continued
    run that ended it, from 1; None: the run has only one.
    """
    ranks = EpochSummary(*np.array(of_ranks).T)
    facts: dict[str, Any] = {} if segment is None else {"segment": segment}
    if _is_known(ranks.validation_s):
        facts["validation"] = Seconds.over(ranks.validation_s)
    if _is_known(ranks.exposed_s) and _is_known(ranks.allreduce_s):
        facts["exposed_communication"] = Seconds.over(ranks.exposed_s)
        if ranks.allreduce_s.any():
            facts["allreduce"] = Seconds.over(ranks.allreduce_s)
            facts["hidden_share"] = 1 - float(ranks.exposed_s.sum() / ranks.allreduce_s.sum())
        useful_s = ranks.seconds - ranks.exposed_s
        facts["efficiency"] = efficiencies(useful_s.tolist(), float(ranks.seconds.max()))
    steps: dict[str, Any] = {"num": int(ranks.num_steps.max())}
    if _is_known(ranks.first_step_s):
        steps["first"] = Seconds.over(ranks.first_step_s)
    if _is_known(ranks.median_step_s):
        steps["median"] = Seconds.over(ranks.median_step_s)
        steps["p99"] = Seconds.over(ranks.p99_step_s)
    return EpochRecord(
        epoch=epoch,
        metrics=dict(metrics),
        train=Seconds.over(ranks.seconds),
        begin=Seconds.over(ranks.begin_s),
        steps=StepTimes(**steps),
        **facts,
    )


def efficiencies(useful_s: Sequence[float], runtime_s: float) -> Efficiency:
    """Returns load balance, communication efficiency and parallel efficiency, each in [0, 1].

    They are defined as by POP, "Standard Metrics for Performance Analysis",
    https://pop-coe.eu/node/69. The last is mean(useful) / runtime, the product of the other two.
    The useful time of a rank is that outside collectives; an allreduce that back-propagation hides
    does not count as one.
    """
    mean_s, longest_s = sum(useful_s) / len(useful_s), max(useful_s)
    return Efficiency(
        load_balance=mean_s / longest_s if longest_s else 1.0,
        communication_efficiency=longest_s / runtime_s if runtime_s else 1.0,
        parallel_efficiency=mean_s / runtime_s if runtime_s else 1.0,
    )


def _is_known(values: NDArray[np.float64]) -> bool:
    return not np.isnan(values).any()
