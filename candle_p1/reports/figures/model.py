"""Figures of models: the curve of the time through the measured points, and shares of phases."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.modelling.phases import PHASES
from candle_p1.modelling.samples import ValueInterval
from candle_p1.reports.drawing import COLORS, count_axis, legend_below, log_axis, new_figure
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.modelled import ModelledSeries, ModelOptions, fitted_words, model_experiment
from candle_p1.reports.quantities import TOTAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from candle_p1.reports.points import Experiment, Series

MAX_COLUMNS = 3
TITLE_WIDTH = 44
LOG_FROM = 20
PHASE_COLORS = (
    "#BBBBBB", COLORS[1], COLORS[4], COLORS[3], COLORS[0], "#88BBDD", COLORS[5], COLORS[2],
    "#77AA99", "#777777",
)  # fmt: skip
PHASE_HATCHES = ("", "//", "..", "\\\\", "", "++", "xx", "", "--", "")
LOOKS: dict[str, dict[str, Any]] = {
    phase: {"facecolor": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
    for phase, color, hatch in zip(PHASES, PHASE_COLORS, PHASE_HATCHES, strict=True)
}


def curve(
    experiment: Experiment,
    series: Sequence[Series],
    options: ModelOptions | None = None,
) -> tuple[Figure, str]:
    """Draws the predicted total time with its band, and the measured runs.

    Raises:
        MissingDataError: No model can be made.
    """
    modelled = _models(experiment, series, options)
    figure, plots = new_figure(len(modelled), MAX_COLUMNS, sharey=True)
    lows, highs = [], []
    for axes, each in zip(plots, modelled, strict=True):
        low, high = _draw_curve(axes, each)
        lows.append(low)
        highs.append(high)
    if max(highs) > LOG_FROM * max(min(lows), 1e-9):
        for axes in plots:
            log_axis(axes)
    else:
        plots[0].set_ylim(bottom=0)
    for axes in plots[::MAX_COLUMNS]:
        axes.set_ylabel("total time (s)")
    legend_below(figure, *plots)
    return figure, f" {fitted_words(modelled)}"


def _draw_curve(axes: Axes, each: ModelledSeries) -> tuple[float, float]:
    """Draws one series; returns the ends of what is shown."""
    counts, source = each.counts(), each.source()
    intervals = [ValueInterval.of(source.samples(num).total_s) for num in counts]
    axes.fill_between(
        counts,
        [found.low for found in intervals],
        [found.high for found in intervals],
        color=COLORS[0],
        alpha=0.18,
        lw=0,
        label="90 % prediction interval of a run",
    )
    most = each.model.rank_counts[-1]
    within = [i for i, num in enumerate(counts) if num <= most]
    beyond = [i for i, num in enumerate(counts) if num >= most]
    for chosen, style, label in ((within, "-", "model"), (beyond, "--", "model, extrapolated")):
        if len(chosen) > 1:
            xs = [counts[i] for i in chosen]
            ys = [intervals[i].value for i in chosen]
            axes.plot(xs, ys, style, color=COLORS[0], lw=1.3, label=label)
    dots = [
        (point.num_ranks, value) for point in each.series.timed for value in point.values(TOTAL.of)
    ]
    xs, ys = [num for num, _ in dots], [value for _, value in dots]
    axes.scatter(xs, ys, label="measured run", s=16, marker="o", color=COLORS[1], zorder=3)
    count_axis(axes, counts, "ranks")
    axes.set_title(fill(each.name, TITLE_WIDTH), fontsize=9)
    return min(found.low for found in intervals), max(found.high for found in intervals)


def shares(
    experiment: Experiment,
    series: Sequence[Series],
    options: ModelOptions | None = None,
) -> tuple[Figure, str]:
    """Draws the share of each phase in the predicted time, against ranks.

    Raises:
        MissingDataError: No model can be made.
    """
    modelled = _models(experiment, series, options)
    figure, plots = new_figure(len(modelled), MAX_COLUMNS, sharey=True)
    for axes, each in zip(plots, modelled, strict=True):
        counts, source = each.counts(), each.source()
        found = [source.samples(num).phases_s for num in counts]
        medians = [{name: float(np.median(s)) for name, s in times.items()} for times in found]
        shares_of = [(times, sum(times.values())) for times in medians]
        bottom = np.zeros(len(counts))
        for phase in PHASES:
            of_phase = np.array([times.get(phase, 0.0) / whole for times, whole in shares_of])
            if of_phase.any():
                top = bottom + 100 * of_phase
                axes.fill_between(counts, bottom, top, label=phase, **LOOKS[phase])
                bottom = top
        axes.axvline(each.model.rank_counts[-1], color="black", lw=1, ls=":")
        count_axis(axes, counts, "ranks")
        axes.set_ylim(0, 100)
        axes.set_title(fill(each.name, TITLE_WIDTH), fontsize=9)
    for axes in plots[::MAX_COLUMNS]:
        axes.set_ylabel("share of the total time (%)")
    legend_below(figure, *plots)
    return figure, f" {fitted_words(modelled)}"


def _models(
    experiment: Experiment, series: Sequence[Series], options: ModelOptions | None
) -> list[ModelledSeries]:
    found, missing = model_experiment(experiment, options or ModelOptions())
    shown = [each.settings for each in series]
    modelled = [each for each in found if each.series.settings in shown and len(each.counts()) > 1]
    if not modelled:
        reasons = dict.fromkeys(reason for _, reason in missing)
        raise MissingDataError("; ".join(reasons) or "all runs are on the same number of ranks")
    return modelled
