"""One side of a comparison: a run, or a set of runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from candle_p1.reports.runs import RecordedRun


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two sets of runs that are compared.

    Attributes:
        name: What the user called it.
        runs: All of its runs, by start.
    """

    name: str
    runs: tuple[RecordedRun, ...]

    @cached_property
    def timed(self) -> tuple[RecordedRun, ...]:
        """The runs whose numbers are compared: undisturbed ones, or else disturbed ones."""
        finished = [run for run in self.runs if run.status == "ok"]
        return tuple(run for run in finished if run.is_timed) or tuple(finished)
