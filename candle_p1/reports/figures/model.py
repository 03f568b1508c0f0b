"""Figures of models: the curve of the time through the measured points, and shares of phases."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.modelling.laws import PHASES
from candle_p1.modelling.samples import interval_of
from candle_p1.reports import drawing
from candle_p1.reports.drawing import COLORS, Drawing
from candle_p1.reports.modelled import Missing, ModelledSeries, fitted_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SERIES, MAX_COLUMNS, TITLE_WIDTH = 6, 3, 44
PHASE_COLORS = (
    "#BBBBBB", COLORS[1], COLORS[4], COLORS[3], COLORS[0], "#88BBDD", COLORS[5], COLORS[2],
    "#77AA99", "#777777",
)  # fmt: skip
PHASE_HATCHES = ("", "//", "..", "\\\\", "", "++", "xx", "", "--", "")


def draw_models(modelled: Sequence[ModelledSeries], prefix: str) -> tuple[list[Drawing], Missing]:
    """Returns the figures of models, and the titles of those that cannot be drawn, with reasons."""
    import matplotlib as mpl

    shown = [each for each in modelled if len(each.counts()) > 1]
    if not shown:
        return [], [("Figures", "all runs are on the same number of ranks")]
    drawn = []
    with mpl.rc_context(drawing.LOOK):
        for first in range(0, len(shown), MAX_SERIES):
            end = f"-{first // MAX_SERIES + 1}" if len(shown) > MAX_SERIES else ""
            drawn += _draw(shown[first : first + MAX_SERIES], prefix, end)
    return drawn, []


def _draw(series: Sequence[ModelledSeries], prefix: str, end: str) -> list[Drawing]:
    kinds = [drawing.new_figure(len(series), MAX_COLUMNS, sharey=True) for _ in range(2)]
    (curves, of_times), (shares, of_shares) = kinds
    bounds = [_draw_curve(axes, each) for axes, each in zip(of_times, series, strict=True)]
    if max(high for _, high in bounds) > drawing.LOG_FROM * max(1e-9, min(b for b, _ in bounds)):
        for axes in of_times:
            drawing.log_axis(axes)
    else:
        of_times[0].set_ylim(bottom=0)
    for axes, each in zip(of_shares, series, strict=True):
        _draw_shares(axes, each)
    labels = ("total time (s)", "share of the total time (%)")
    for (figure, plots), label in zip(kinds, labels, strict=True):
        for axes, each in zip(plots, series, strict=True):
            drawing.count_axis(axes, each.counts(), "ranks")
            axes.set_title(fill(each.name, TITLE_WIDTH), fontsize=9)
        for axes in plots[::MAX_COLUMNS]:
            axes.set_ylabel(label)
        drawing.legend_below(figure, *plots)
    fitted = fitted_words(series)
    return [
        drawing.to_drawing(
            curves,
            f"{prefix}-model{end}",
            "Model: total time against ranks",
            "The model's curve and band through the measured runs, and beyond them to four times as"
            f" many ranks. Numbers of ranks that cannot share the epochs are left out. {fitted}",
        ),
        drawing.to_drawing(
            shares,
            f"{prefix}-model-shares{end}",
            "Model: where the time goes",
            "The share of each phase in the predicted time. To the right of the dotted line nothing"
            f" was measured. {fitted}",
        ),
    ]


def _draw_curve(axes: Axes, each: ModelledSeries) -> tuple[float, float]:
    """Draws one series; returns the ends of what is shown."""
    counts, source = each.counts(), each.source()
    found = [interval_of(source.samples(num).total_s) for num in counts]
    lows, highs = ([interval[end] for interval in found] for end in ("low", "high"))
    band: Any = {"color": COLORS[0], "alpha": 0.18, "lw": 0}
    axes.fill_between(counts, lows, highs, label="90 % prediction interval of a run", **band)
    most, medians = each.model.rank_counts[-1], [interval["value"] for interval in found]
    num = sum(count <= most for count in counts)
    line: Any = {"color": COLORS[0], "lw": 1.3}
    axes.plot(counts[:num], medians[:num], "-", label="model", **line)
    if num < len(counts):
        start = max(0, num - 1)
        axes.plot(counts[start:], medians[start:], "--", label="model, extrapolated", **line)
    dots = [(num, run.total_s) for num, runs in each.runs.items() for run in runs]
    dot: Any = {"s": 16, "marker": "o", "color": COLORS[1], "zorder": 3}
    axes.scatter(*zip(*dots, strict=True), label="measured run", **dot)
    return min(lows), max(highs)


def _draw_shares(axes: Axes, each: ModelledSeries) -> None:
    counts, source = each.counts(), each.source()
    found = [source.samples(num).phases_s for num in counts]
    medians = np.array([[np.median(times.get(name, 0.0)) for name in PHASES] for times in found])
    tops = np.cumsum(100 * medians / medians.sum(axis=1, keepdims=True), axis=1)
    bottom = np.zeros(len(counts))
    for phase, top, color, hatch in zip(PHASES, tops.T, PHASE_COLORS, PHASE_HATCHES, strict=True):
        if (top > bottom).any():
            look: Any = {"facecolor": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
            axes.fill_between(counts, bottom, top, label=phase, **look)
            bottom = top
    axes.axvline(each.model.rank_counts[-1], color="black", lw=1, ls=":")
    axes.set_ylim(0, 100)
