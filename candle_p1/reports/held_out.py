"""Runs that models were not fitted to, beside what these predict for them, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.modelling.observation import observe
from candle_p1.modelling.phases import PHASES
from candle_p1.modelling.samples import ValueInterval
from candle_p1.reports.table import ReportTable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from candle_p1.modelling.samples import Array
    from candle_p1.reports.modelled import ModelledSeries
    from candle_p1.reports.table import Cell

WHOLE_RUN = "whole run"


@dataclass(frozen=True)
class HeldOutTime:
    """A phase of the runs of a series on some ranks, measured and predicted.

    Attributes:
        series: The name of the series.
        num_ranks: The number of ranks.
        phase: The phase, or WHOLE_RUN.
        measured_s: The seconds that it took, mean over ranks, for each run.
        predicted_s: What the model predicts for a single run.
    """

    series: str
    num_ranks: int
    phase: str
    measured_s: Sequence[float]
    predicted_s: ValueInterval

    @property
    def num_inside(self) -> int:
        """How many runs are in the interval."""
        found = self.predicted_s
        return sum(found.low <= each <= found.high for each in self.measured_s)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return {
            "series": self.series,
            "ranks": self.num_ranks,
            "phase": self.phase,
            "measured_s": list(self.measured_s),
            "predicted_s": self.predicted_s.to_dict(),
            "inside": self.num_inside,
        }


def held_out_times(
    modelled: Sequence[ModelledSeries], held_out: Collection[int]
) -> list[HeldOutTime]:
    """Returns the whole time and the phases of all runs that were held out.

    Args:
        modelled: The models.
        held_out: The numbers of ranks whose runs they were not fitted to.
    """
    return [
        time
        for each in modelled
        for point in each.series.timed
        if point.num_ranks in held_out
        for time in _times(each, point.num_ranks)
    ]


def _times(each: ModelledSeries, num_ranks: int) -> Iterator[HeldOutTime]:
    point = each.series.at(num_ranks)
    runs = [found for run in point.runs if (found := observe(run.record))] if point else []
    predicted = each.source().samples(num_ranks)

    def time(phase: str, measured_s: list[float], samples: Array) -> HeldOutTime:
        return HeldOutTime(each.name, num_ranks, phase, measured_s, ValueInterval.of(samples))

    yield time(WHOLE_RUN, [run.total_s for run in runs], predicted.total_s)
    for phase in PHASES:
        measured_s = [run.phases_s[phase] for run in runs]
        samples = predicted.phases_s.get(phase)
        if samples is not None:
            yield time(phase, measured_s, samples)
        elif any(measured_s):  # no run that the model was fitted to has the phase
            yield time(phase, measured_s, np.zeros(1))


def runs_inside(times: Sequence[HeldOutTime]) -> tuple[int, int]:
    """Returns how many runs took as long as was predicted, and of how many."""
    whole = [each for each in times if each.phase == WHOLE_RUN]
    return sum(each.num_inside for each in whole), sum(len(each.measured_s) for each in whole)


def held_out_table(times: Sequence[HeldOutTime], prefix: str) -> ReportTable:
    """Returns the medians of the runs that were held out, beside the predictions."""
    rows: list[tuple[Cell, ...]] = []
    for each in times:
        measured_s, found = median(each.measured_s), each.predicted_s
        rows.append(
            (
                each.series,
                each.num_ranks,
                each.phase,
                measured_s,
                len(each.measured_s),
                each.num_inside,
                found.value,
                found.low,
                found.high,
                found.value - measured_s,
            )
        )
    headings = (
        "series", "ranks", "phase", "measured (s)", "runs", "of these, in the interval",
        "predicted (s)", "low (s)", "high (s)", "predicted less measured (s)",
    )  # fmt: skip
    notes = (
        "The models were not fitted to these runs. Measured is their median. Low and high are the"
        " ends of 90 % prediction intervals for single runs; those of phases do not add up to that"
        " of the whole run.",
    )
    title = "Model: runs that were held out"
    return ReportTable(f"{prefix}-model-held-out", title, headings, tuple(rows), notes)
