"""Figures of bars: where the time goes, and what each rank does when."""

from __future__ import annotations

from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.records.per_rank import PER_RANK_NAME
from candle_p1.reports.drawing import COLORS, legend_below, new_figure
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.quantities import (
    COMMUNICATING,
    LOADING,
    OTHER,
    PARTS,
    STARTUP,
    TOTAL,
    TRAINING,
    WAITING,
    parts_s,
)
from candle_p1.reports.words import number
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from candle_p1.reports.points import Experiment, Point, Series
    from candle_p1.reports.runs import RecordedRun

_COLORS = ("#BBBBBB", COLORS[1], COLORS[4], COLORS[0], COLORS[3], COLORS[5], "#777777")
_HATCHES = ("", "//", "..", "", "\\\\", "xx", "")
LOOKS: dict[str, Any] = {
    part: {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
    for part, color, hatch in zip(PARTS, _COLORS, _HATCHES, strict=True)
}
"""How each part of the time is drawn."""

MAX_COLUMNS = 3
TITLE_WIDTH = 44
MAX_BARS = 4
"""With more bars side by side there is no room for percentages."""

MIN_BARS = 3
"""With fewer, bars are as narrow as with so many."""

LABEL_SHARE = 0.1
"""A smaller part has no room for its percentage."""

MAX_ROWS = 12
WIDTH_INCHES, ROW_INCHES, BESIDE_INCHES = 7.4, 0.16, 0.75
SHOWN = {
    "startup": (STARTUP, LOOKS[STARTUP]),
    "load": (LOADING, LOOKS[LOADING]),
    "wait": (WAITING, LOOKS[WAITING]),
    "transfer": ("transfer of the weights", LOOKS[COMMUNICATING]),
    "train": ("training, including communication", LOOKS[TRAINING]),
}
"""Names and looks of phases, and of the parts of the broadcast."""

REST = (OTHER, LOOKS[OTHER])
IN_PARTS = "broadcast"
"""The phase of which the parts are drawn."""


def time_parts(_experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws a panel per series, with a bar per number of ranks and its total time above."""
    columns = 2 if len(series) in (2, 4) else MAX_COLUMNS
    figure, plots = new_figure(len(series), columns, sharey=True)
    counts = sorted({point.num_ranks for each in series for point in each.timed})
    for axes, each in zip(plots, series, strict=True):
        for i, num_ranks in enumerate(counts):
            point = each.at(num_ranks)
            if point is not None:
                _draw_bar(axes, i, point, has_room=len(counts) <= MAX_BARS)
        axes.set_xticks(range(len(counts)), [f"{num:,}" for num in counts])
        beside = 0.5 + max(0, MIN_BARS - len(counts)) / 2
        axes.set_xlim(-beside, len(counts) - 1 + beside)
        axes.set_xlabel("ranks")
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 20))
        axes.set_title(fill(each.name, TITLE_WIDTH), fontsize=9)
    for axes in plots[::columns]:
        axes.set_ylabel("share of the total time (%)")
    medians = [_medians_s(point) for each in series for point in each.timed]
    for part in PARTS:
        if any(times.get(part) for times in medians):
            plots[0].bar(0, 0, label=part, **LOOKS[part])
    legend_below(figure, plots[0])
    return figure


def _draw_bar(axes: Axes, x: int, point: Point, *, has_room: bool) -> None:
    """Stacks the medians of the parts, scaled to a sum of 100 %."""
    medians_s = _medians_s(point)
    bottom = 0.0
    for part, seconds in medians_s.items():
        share = seconds / sum(medians_s.values())
        axes.bar(x, 100 * share, bottom=bottom, width=0.75, **LOOKS[part])
        if has_room and share > LABEL_SHARE:
            axes.text(
                x,
                bottom + 50 * share,
                f"{share:.0%}",
                ha="center",
                va="center",
                fontsize="small",
                bbox={"fc": "white", "ec": "none", "pad": 1, "alpha": 0.85},
            )
        bottom += 100 * share
    total = point.estimate(TOTAL.of)
    if total is not None:
        text = number(total.value) + (" s" if has_room else "")
        axes.text(x, 101, text, ha="center", va="bottom", fontsize="x-small")


def _medians_s(point: Point) -> dict[str, float]:
    """Returns the medians of the parts over the runs that know them, in order."""
    times = [parts_s(run) for run in point.runs]
    values = {part: [time[part] for time in times if part in time] for part in PARTS}
    return {part: median(known) for part, known in values.items() if known}


def ranks_over_time(_experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws a panel per series with a row per rank: the median run on the most ranks.

    Raises:
        MissingDataError: All runs had one rank, or the times of individual ranks are missing.
    """
    several = [each for each in series if each.timed[-1].num_ranks > 1]
    if not several:
        raise MissingDataError("all runs had one rank, which waits for no other")
    runs = {each.name: run for each in several if (run := _median_run(each)).per_rank}
    if not runs:
        raise MissingDataError(f"the times of individual ranks are missing ({PER_RANK_NAME})")
    shown = {name: chosen(run) for name, run in runs.items()}
    size = (WIDTH_INCHES, BESIDE_INCHES + ROW_INCHES * max(map(len, shown.values())))
    figure, plots = new_figure(len(runs), 1, size, sharex=True)
    for axes, (name, run) in zip(plots, runs.items(), strict=True):
        draw_ranks(axes, run, shown[name], SHOWN)
        axes.set_title(f"{name}, {count(run.num_ranks, 'rank')}", fontsize=9)
    plots[-1].set_xlabel("seconds since the start of the run")
    for label, look in (*SHOWN.values(), REST):
        plots[0].barh(0, 0, label=label, **look)
    legend_below(figure, plots[0])
    return figure


def _median_run(series: Series) -> RecordedRun:
    runs = sorted(series.timed[-1].runs, key=lambda run: run.total_s or 0.0)
    return runs[len(runs) // 2]


def draw_ranks(
    axes: Axes, run: RecordedRun, shown: Sequence[int], looks: Mapping[str, tuple[str, Any]]
) -> None:
    """Draws the phases of some ranks as rows.

    Args:
        axes: Where to draw.
        run: A run with the values of its ranks.
        shown: The ranks.
        looks: The label and look of each phase and part; the others look like REST.
    """
    stretches = list(run.stretches())
    has_parts = any(each.within == IN_PARTS for each in stretches)
    for each in stretches:
        if each.within in ("", IN_PARTS) and not (has_parts and each.name == IN_PARTS):
            _, look = looks.get(each.name, REST)
            for row, rank in enumerate(shown):
                if not np.isnan(each.begin_s[rank]):
                    axes.barh(row, each.seconds[rank], left=each.begin_s[rank], height=0.9, **look)
    axes.set_yticks(range(len(shown)), [str(rank) for rank in shown], fontsize=7)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_ylabel("rank")
    axes.grid(visible=False)


def chosen(run: RecordedRun) -> list[int]:
    """Returns all ranks; of many, evenly spaced ones and the fastest and slowest at loading."""
    if run.num_ranks <= MAX_ROWS:
        return list(range(run.num_ranks))
    chosen = set(np.linspace(0, run.num_ranks - 1, MAX_ROWS).round().astype(int).tolist())
    for each in run.stretches():
        if each.name == "load" and not each.within:
            chosen |= {int(np.argmin(each.seconds)), int(np.argmax(each.seconds))}
    return sorted(chosen)
