"""Figures of models: the curve of the time through the measured points, and shares of phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.modelling.laws import PHASES
from candle_p1.modelling.samples import interval_of
from candle_p1.reports.drawing import (
    COLORS,
    LOOK,
    Drawing,
    count_axis,
    legend_below,
    log_axis,
    new_figure,
    to_drawing,
)
from candle_p1.reports.modelled import ModelledSeries, fitted_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SERIES, MAX_COLUMNS = 6, 3
TITLE_WIDTH = 44
LOG_FROM = 20
PHASE_COLORS = (
    "#BBBBBB", COLORS[1], COLORS[4], COLORS[3], COLORS[0], "#88BBDD", COLORS[5], COLORS[2],
    "#77AA99", "#777777",
)  # fmt: skip
PHASE_HATCHES = ("", "//", "..", "\\\\", "", "++", "xx", "", "--", "")
KINDS: dict[str, tuple[str, str, str]] = {
    "model": (
        "Model: total time against ranks",
        "The model's curve and band through the measured runs, and beyond them to four times as"
        " many ranks. Numbers of ranks that cannot share the epochs are left out.",
        "total time (s)",
    ),
    "model-shares": (
        "Model: where the time goes",
        "The share of each phase in the predicted time. To the right of the dotted line nothing was"
        " measured.",
        "share of the total time (%)",
    ),
}
"""Title, caption and y axis of each kind of figure, by the last part of its slug."""


def draw_models(
    modelled: Sequence[ModelledSeries], prefix: str
) -> tuple[list[Drawing], list[tuple[str, str]]]:
    """Returns the figures of models, and the titles of those that cannot be drawn, with reasons."""
    import matplotlib as mpl

    shown = [each for each in modelled if len(each.counts()) > 1]
    if not shown:
        reason = "all runs are on the same number of ranks"
        return [], [(title, reason) for title, _, _ in KINDS.values()]
    facets = [shown[i : i + MAX_SERIES] for i in range(0, len(shown), MAX_SERIES)]
    drawn = []
    with mpl.rc_context(LOOK):
        for kind, (title, caption, y_label) in KINDS.items():
            for i, series in enumerate(facets, 1):
                figure, plots = new_figure(len(series), MAX_COLUMNS, sharey=True)
                draw: Callable[[Axes, ModelledSeries], None]
                draw = _draw_curve if kind == "model" else _draw_shares
                for axes, each in zip(plots, series, strict=True):
                    draw(axes, each)
                    count_axis(axes, each.counts(), "ranks")
                    axes.set_title(fill(each.name, TITLE_WIDTH), fontsize=9)
                if kind == "model":
                    _scale_times(plots)
                for axes in plots[::MAX_COLUMNS]:
                    axes.set_ylabel(y_label)
                legend_below(figure, *plots)
                slug, of = f"{prefix}-{kind}", ""
                if len(facets) > 1:
                    slug, of = f"{slug}-{i}", f" ({i} of {len(facets)})"
                told = f"{caption} {fitted_words(series)}"
                drawn.append(to_drawing(figure, slug, title + of, told))
    return drawn, []


def _draw_curve(axes: Axes, each: ModelledSeries) -> None:
    counts, source = each.counts(), each.source()
    found = [interval_of(source.samples(num).total_s) for num in counts]
    lows, highs = [each["low"] for each in found], [each["high"] for each in found]
    band: Any = {"color": COLORS[0], "alpha": 0.18, "lw": 0}
    axes.fill_between(counts, lows, highs, label="90 % prediction interval of a run", **band)
    most = each.model.rank_counts[-1]
    within = [i for i, num in enumerate(counts) if num <= most]
    beyond = [i for i, num in enumerate(counts) if num >= most]
    for chosen, style, label in ((within, "-", "model"), (beyond, "--", "model, extrapolated")):
        if len(chosen) > 1:
            xs, ys = [counts[i] for i in chosen], [found[i]["value"] for i in chosen]
            axes.plot(xs, ys, style, color=COLORS[0], lw=1.3, label=label)
    dots = [(num, run.total_s) for num, runs in each.runs.items() for run in runs]
    xs, ys = [num for num, _ in dots], [seconds for _, seconds in dots]
    axes.scatter(xs, ys, label="measured run", s=16, marker="o", color=COLORS[1], zorder=3)


def _scale_times(plots: Sequence[Axes]) -> None:
    low, high = min(each.dataLim.y0 for each in plots), max(each.dataLim.y1 for each in plots)
    if high > LOG_FROM * max(low, 1e-9):
        for axes in plots:
            log_axis(axes)
    else:
        plots[0].set_ylim(bottom=0)


def _draw_shares(axes: Axes, each: ModelledSeries) -> None:
    counts, source = each.counts(), each.source()
    found = [source.samples(num).phases_s for num in counts]
    medians = np.array([[np.median(times.get(name, 0.0)) for name in PHASES] for times in found])
    tops = np.cumsum(100 * medians / medians.sum(axis=1, keepdims=True), axis=1)
    bottoms = np.hstack([np.zeros((len(counts), 1)), tops[:, :-1]])
    for i, phase in enumerate(PHASES):
        if medians[:, i].any():
            axes.fill_between(
                counts,
                bottoms[:, i],
                tops[:, i],
                label=phase,
                facecolor=PHASE_COLORS[i],
                hatch=PHASE_HATCHES[i],
                edgecolor="white",
                linewidth=0.4,
            )
    axes.axvline(each.model.rank_counts[-1], color="black", lw=1, ls=":")
    axes.set_ylim(0, 100)
