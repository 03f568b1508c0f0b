"""Where the time goes: the parts' shares of the total time, for every number of workers."""

from __future__ import annotations

from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any

from candle_p1.reports.drawing import COLORS, legend_below, new_figure
from candle_p1.reports.quantities import PARTS, TOTAL, parts_s
from candle_p1.reports.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from candle_p1.reports.points import Experiment, Point, Series

_COLORS = ("#BBBBBB", COLORS[1], COLORS[4], COLORS[0], COLORS[3], COLORS[5], "#777777")
_HATCHES = ("", "//", "..", "", "\\\\", "xx", "")
PART_LOOKS: dict[str, Any] = {
    part: {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
    for part, color, hatch in zip(PARTS, _COLORS, _HATCHES, strict=True)
}
"""How each part is drawn."""

MAX_COLUMNS = 3
TITLE_WIDTH = 44
MAX_BARS = 4
"""With more beside each other the percentages have no room."""

LABEL_SHARE = 0.1
"""A part that takes less of the time has no room for its percentage."""


def time_parts(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws a panel per series, with a bar per number of workers and its total time above."""
    columns = 2 if len(series) in (2, 4) else MAX_COLUMNS
    figure, plots = new_figure(len(series), columns, sharey=True)
    counts = sorted({point.num_ranks for each in series for point in each.timed})
    for axes, each in zip(plots, series, strict=True):
        for i, num_ranks in enumerate(counts):
            point = each.at(num_ranks)
            if point is not None:
                _draw_bar(axes, i, point, has_room=len(counts) <= MAX_BARS)
        axes.set_xticks(range(len(counts)), [f"{count:,}" for count in counts])
        axes.set_xlabel("workers")
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 20))
        axes.set_title(fill(each.name, TITLE_WIDTH), fontsize=9)
    for axes in plots[::columns]:
        axes.set_ylabel("share of the total time (%)")
    known = {part for each in series for point in each.timed for part in _parts_s(point)}
    for part in PARTS:
        if part in known:
            plots[0].bar(0, 0, label=part, **PART_LOOKS[part])
    legend_below(figure, plots[0])
    return figure


def _draw_bar(axes: Axes, x: int, point: Point, *, has_room: bool) -> None:
    """Stacks the medians of the parts, scaled to 100 % in all."""
    medians = _parts_s(point)
    bottom = 0.0
    for part, seconds in medians.items():
        share = seconds / sum(medians.values())
        axes.bar(x, 100 * share, bottom=bottom, width=0.75, **PART_LOOKS[part])
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
        unit = " s" if has_room else ""
        axes.text(
            x, 101, f"{number(total.value)}{unit}", ha="center", va="bottom", fontsize="x-small"
        )


def _parts_s(point: Point) -> dict[str, float]:
    """Returns the medians of the parts over the runs that know them, in s, in their order."""
    times = [parts_s(run) for run in point.runs]
    values = {part: [time[part] for time in times if part in time] for part in PARTS}
    return {part: median(known) for part, known in values.items() if known}
