"""How long runs will take: by records of the same study, or else by their time limits."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING, Any

from candle_p1.studies.state import OK
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from candle_p1.studies.planned import PlannedRun
    from candle_p1.studies.state import RunState

LAUNCH_S = 3.0
"""Of every run, what its record does not see: starting processes until they have joined by MPI."""
SAME, NEAR, LIMIT = "same", "near", "limit"


@dataclass(frozen=True)
class Measured:
    """How long a run has taken.

    Attributes:
        run: The run.
        total_s: All of it, in s.
        train_s: Its training.
    """

    run: PlannedRun
    total_s: float
    train_s: float

    @classmethod
    def of(cls, run: PlannedRun, record: Mapping[str, Any]) -> Measured:
        """Returns what a record that is ok says."""
        return cls(run, record["total_s"], record["phases"]["train"]["max_s"])


@dataclass(frozen=True)
class Estimate:
    """How long a run will take.

    Attributes:
        seconds: In s.
        basis: "same": the median of runs of the same point; "near": the runs of the nearest other
            one; "limit": there are none, and this is its time limit.
    """

    seconds: float
    basis: str


@dataclass(frozen=True)
class Cost:
    """How long several runs will take, one after the other.

    Attributes:
        estimates: Of each.
    """

    estimates: Sequence[Estimate]

    @property
    def seconds(self) -> float:
        """All of them, in s."""
        return sum(estimate.seconds for estimate in self.estimates)

    def words(self, elapsed_s: float = 0.0) -> str:
        """Returns the time that is left in words, when the first run has gone on for some, in s."""
        first_s = self.estimates[0].seconds if self.estimates else 0.0
        is_bound = any(estimate.basis == LIMIT for estimate in self.estimates)
        left_s = self.seconds - min(elapsed_s, first_s)
        return f"{'at most' if is_bound else 'about'} {duration(left_s)}"

    def explain(self) -> str:
        """Returns the cost in words, with what it is from."""
        num = {
            basis: sum(estimate.basis == basis for estimate in self.estimates)
            for basis in (SAME, NEAR, LIMIT)
        }
        bases = [
            f"{num[basis]} by {words}"
            for basis, words in (
                (SAME, "finished runs of the same point"),
                (NEAR, "finished runs of the nearest one"),
                (LIMIT, "their time limit"),
            )
            if num[basis]
        ]
        runs = count(len(self.estimates), "run")
        return f"{runs}, {self.words()}: {', '.join(bases)}"


def measured(states: Iterable[RunState]) -> list[Measured]:
    """Returns how long the runs that are done have taken."""
    return [
        Measured.of(state.run, state.record)
        for state in states
        if state.status == OK and state.record
    ]


def cost(runs: Iterable[PlannedRun], known: Sequence[Measured]) -> Cost:
    """Returns how long runs will take; see `estimate`."""
    return Cost([estimate(run, known) for run in runs])


def estimate(run: PlannedRun, known: Sequence[Measured]) -> Estimate:
    """Returns how long a run will take.

    By runs of the same point it is their median. Else those of the nearest point of the benchmark
    are taken, first by what is varied, then by the ratio of ranks: the median of what they took
    beside training, plus the epochs of each rank times the median of what an epoch took.

    Args:
        run: The run.
        known: What is known of others of its study.
    """
    limit_s = 60.0 * run.minutes
    others = [each for each in known if each.run.benchmark == run.benchmark]
    if not others:
        return Estimate(limit_s, LIMIT)
    same = [each.total_s for each in others if each.run.point == run.point]
    if same:
        return Estimate(min(LAUNCH_S + statistics.median(same), limit_s), SAME)
    nearest = min(others, key=lambda each: _distance(run, each.run)).run.point
    at_nearest = [each for each in others if each.run.point == nearest]
    beside_s = statistics.median(each.total_s - each.train_s for each in at_nearest)
    epoch_s = statistics.median(each.train_s / each.run.epochs_per_rank for each in at_nearest)
    seconds = LAUNCH_S + beside_s + epoch_s * run.epochs_per_rank
    return Estimate(min(seconds, limit_s), NEAR)


def duration(seconds: float) -> str:
    """Returns a time in words: "41 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _distance(run: PlannedRun, other: PlannedRun) -> tuple[bool, float, str]:
    """Returns what nearness is judged by; the point's name decides between equals."""
    ratio = abs(log2(run.num_ranks / other.num_ranks))
    return run.series != other.series, ratio, other.point
