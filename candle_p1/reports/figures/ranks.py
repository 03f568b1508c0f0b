"""Where each worker is at which time, as the paper's Figures 7(b), 12 and 19 show the broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.drawing import legend_below, new_figure
from candle_p1.reports.figures.parts import PART_LOOKS
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.quantities import (
    COMMUNICATING,
    LOADING,
    OTHER,
    STARTUP,
    TRAINING,
    WAITING,
)
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from candle_p1.reports.points import Experiment, Series
    from candle_p1.reports.runs import RecordedRun

MAX_ROWS = 12
WIDTH_INCHES, ROW_INCHES, BESIDE_INCHES = 7.4, 0.16, 0.75
SHOWN = {
    "startup": (STARTUP, PART_LOOKS[STARTUP]),
    "load": (LOADING, PART_LOOKS[LOADING]),
    "wait": (WAITING, PART_LOOKS[WAITING]),
    "transfer": ("transfer of the weights", PART_LOOKS[COMMUNICATING]),
    "train": ("training, with its communication", PART_LOOKS[TRAINING]),
}
"""Name and look of phases, and of the parts of the broadcast."""
SHOWN_IN_PARTS = ("broadcast",)
REST = (OTHER, PART_LOOKS[OTHER])


def ranks_over_time(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws a panel per series, a row per worker: the median run on the most workers.

    Raises:
        MissingDataError: All runs had one worker.
    """
    runs = {each.name: _median_run(each) for each in series if each.timed[-1].num_ranks > 1}
    if not runs:
        raise MissingDataError("all runs had one worker, which waits for none")
    rows = max(min(run.num_ranks, MAX_ROWS) for run in runs.values())
    size = (WIDTH_INCHES, BESIDE_INCHES + ROW_INCHES * rows)
    figure, plots = new_figure(len(runs), 1, size, sharex=True)
    for axes, (name, run) in zip(plots, runs.items(), strict=True):
        _draw(axes, run)
        axes.set_title(f"{name}, {count(run.num_ranks, 'worker')}", fontsize=9)
    plots[-1].set_xlabel("seconds since the start of the run")
    for label, look in (*SHOWN.values(), REST):
        plots[0].barh(0, 0, label=label, **look)
    legend_below(figure, plots[0])
    return figure


def _median_run(series: Series) -> RecordedRun:
    runs = sorted(series.timed[-1].runs, key=lambda run: run.total_s or 0.0)
    return runs[len(runs) // 2]


def _draw(axes: Axes, run: RecordedRun) -> None:
    shown = _chosen(run.num_ranks)
    stretches = list(run.stretches())
    replaced = {each.within for each in stretches if each.within in SHOWN_IN_PARTS}
    for each in stretches:
        if each.within not in ("", *SHOWN_IN_PARTS) or each.name in replaced:
            continue
        _, look = SHOWN.get(each.name, REST)
        for row, rank in enumerate(shown):
            begin_s = each.begin_s[rank]
            if begin_s is not None:
                axes.barh(row, each.seconds[rank], left=begin_s, height=0.9, **look)
    axes.set_yticks(range(len(shown)), [str(rank) for rank in shown], fontsize=7)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_ylabel("rank")
    axes.grid(visible=False)


def _chosen(num_ranks: int) -> list[int]:
    """Returns all ranks, or of many some at equal distances, with the first and the last."""
    if num_ranks <= MAX_ROWS:
        return list(range(num_ranks))
    return sorted({round(i * (num_ranks - 1) / (MAX_ROWS - 1)) for i in range(MAX_ROWS)})
