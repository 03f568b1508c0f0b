"""The epochs of a training run: their times, their steps and their parallel efficiency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.instrument.efficiency import efficiencies
from candle_p1.records.record import over_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Epoch:
    """The training part of an epoch on one rank.

    Attributes:
        begin_s: When it began, in s from the start of the run.
        seconds: How long it took.
        steps_s: The time of each step, in s, from its begin to that of the next.
        exposed_s: The part of `seconds` in which this rank waited for gradient allreduces that
            back-propagation did not hide; 0 on one rank; None if it was not measured.
        allreduce_s: The time in which any gradient allreduce was in progress, hidden or not; like
            `exposed_s` 0 or None.
    """

    begin_s: float
    seconds: float
    steps_s: Sequence[float]
    exposed_s: float | None = 0.0
    allreduce_s: float | None = 0.0


def summarize_epoch(of_ranks: Sequence[Epoch], *, is_first: bool) -> dict[str, Any]:
    """Returns an epoch as it stands in a run record.

    Args:
        of_ranks: The epoch on each rank.
        is_first: Whether to report its first step, in which the framework compiles, separately.
    """
    train = over_ranks([epoch.seconds for epoch in of_ranks], "s")
    facts: dict[str, Any] = {
        "per_rank_begin_s": [epoch.begin_s for epoch in of_ranks],
        "train": train,
        "steps": _summarize_steps([epoch.steps_s for epoch in of_ranks], is_first=is_first),
    }
    exposed = [epoch.exposed_s for epoch in of_ranks if epoch.exposed_s is not None]
    allreduce = [epoch.allreduce_s for epoch in of_ranks if epoch.allreduce_s is not None]
    if len(exposed) == len(allreduce) == len(of_ranks):
        facts["exposed_communication"] = over_ranks(exposed, "s")
        if any(allreduce):
            facts["exchange"] = over_ranks(allreduce, "s")
            facts["hidden_share"] = 1 - sum(exposed) / sum(allreduce)
        useful = [epoch.seconds - seconds for epoch, seconds in zip(of_ranks, exposed, strict=True)]
        facts["efficiency"] = efficiencies(useful, train["max_s"])
    return facts


def _summarize_steps(of_ranks: Sequence[Sequence[float]], *, is_first: bool) -> dict[str, Any]:
    """Returns the number of steps, their median and 99th percentile, and the first if asked."""
    facts: dict[str, Any] = {"num": max(len(steps) for steps in of_ranks)}
    if is_first and facts["num"]:
        facts["first"] = over_ranks([steps[0] for steps in of_ranks], "s")
        of_ranks = [steps[1:] for steps in of_ranks]
    if all(of_ranks):
        for name, percent in (("median", 50), ("p99", 99)):
            of_rank = [float(np.percentile(steps, percent)) for steps in of_ranks]
            facts[name] = over_ranks(of_rank, "s")
    return facts
