"""Power over time of single runs, with the phases behind it, as the paper's Figure 7(a)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.power_picture import power_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from candle_p1.reports.points import Series
    from candle_p1.reports.runs import RecordedRun


def run_to_draw(series: Series) -> RecordedRun:
    """Returns the run of a series with readings of power on the most ranks; the median by time.

    Raises:
        MissingDataError: None has any.
    """
    for point in reversed(series.points):
        runs = [run for run in (*point.runs, *point.disturbed) if run.power_files]
        if runs:
            return sorted(runs, key=lambda run: run.total_s or 0.0)[len(runs) // 2]
    raise MissingDataError("no run has readings of power")


def power_over_time(run: RecordedRun) -> Figure:
    """Draws power over time with the phases.

    Raises:
        DataError: A file of readings is missing or damaged.
    """
    return power_figure(run)
