"""Estimates how long runs will take: from finished runs, or else from their time limits."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.studies.planned_run import PlannedRun
    from candle_p1.studies.run_state import RunState
    from candle_p1.studies.similar import SimilarRuns

LAUNCH_S = 3.0
"""The time of every run before its record begins: until its processes have joined through MPI."""
SAME, NEAR, SIMILAR, LIMIT = "same", "near", "similar", "limit"
BASES = {
    SAME: "from finished runs of the same point",
    NEAR: "from finished runs of the nearest point",
    SIMILAR: "scaled from runs of the same network on this machine",
    LIMIT: "from their time limit, because nothing similar has been measured yet",
}


@dataclass(frozen=True)
class CostEstimate:
    """How long a run will take.

    Attributes:
        seconds: In s.
        basis: "same" if it is the median of runs of the same point, "near" if it is derived from
            the nearest other point, "similar" if it is derived from a run outside the study,
            "limit" if there is none and it is the time limit.
    """

    seconds: float
    basis: str


def remaining(estimates: Sequence[CostEstimate], elapsed_s: float = 0.0) -> str:
    """Returns the time of runs as text, `elapsed_s` after the first of them has started."""
    seconds = [estimate.seconds for estimate in estimates]
    is_bound = any(estimate.basis == LIMIT for estimate in estimates)
    remaining_s = sum(seconds) - min(elapsed_s, seconds[0] if seconds else 0.0)
    return f"{'at most' if is_bound else 'about'} {duration(remaining_s)}"


def explain(estimates: Sequence[CostEstimate]) -> str:
    """Returns the time of runs as text, with what it is derived from."""
    bases = [estimate.basis for estimate in estimates]
    parts = [f"{bases.count(basis)} {text}" for basis, text in BASES.items() if basis in bases]
    return f"{count(len(bases), 'run')}, {remaining(estimates)}: {', '.join(parts)}"


def estimate(
    run: PlannedRun, finished: Sequence[RunState], similar: SimilarRuns | None = None
) -> CostEstimate:
    """Returns how long a run will take, which is at most its time limit.

    If runs of the same point have finished, it is their median. Otherwise it is derived from the
    nearest point of the same benchmark, where the same series comes first and then the ratio of
    ranks: the median time outside training, plus the number of epochs times the median of an epoch.

    Args:
        run: The run.
        finished: Other runs of its study that are ok.
        similar: Runs outside the study, which count only if no run of this benchmark is finished.
    """
    limit_s = 60.0 * run.minutes
    others = [state for state in finished if state.run.benchmark == run.benchmark]
    if not others:
        seconds = similar.estimate_s(run) if similar else None
        if seconds is None:
            return CostEstimate(limit_s, LIMIT)
        return CostEstimate(min(LAUNCH_S + seconds, limit_s), SIMILAR)
    same = [state.total_s for state in others if state.run.point == run.point]
    if same:
        return CostEstimate(min(LAUNCH_S + statistics.median(same), limit_s), SAME)
    nearest = min(others, key=lambda state: _distance(run, state.run)).run.point
    others = [state for state in others if state.run.point == nearest]
    outside_s = statistics.median(state.total_s - state.train_s for state in others)
    epoch_s = statistics.median(state.train_s / state.run.epochs_per_rank for state in others)
    seconds = LAUNCH_S + outside_s + epoch_s * run.epochs_per_rank
    return CostEstimate(min(seconds, limit_s), NEAR)


def duration(seconds: float) -> str:
    """Returns a time as text: "41 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _distance(run: PlannedRun, other: PlannedRun) -> tuple[bool, float, str]:
    """Returns a key for nearness; the name decides between points at the same distance."""
    ratio = abs(log2(run.num_ranks / other.num_ranks))
    return run.series != other.series, ratio, other.point
