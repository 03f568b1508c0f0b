"""Quantities against the number of workers: a panel per quantity, a line per series."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.reports.drawing import (
    LOG_FROM,
    Mark,
    draw_line,
    legend_below,
    log_axis,
    new_figure,
    value_axis,
    worker_axis,
)
from candle_p1.reports.improvements import improvements, pairs
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.points import BATCH, STRONG
from candle_p1.reports.quantities import (
    COMMUNICATION,
    ENERGY,
    EPOCH,
    LOAD,
    LOAD_BALANCE,
    PARALLEL_EFFICIENCY,
    POWER,
    TOTAL,
    TRAIN,
    Quantity,
    covered,
    labelled,
    merit,
    quality_on_test,
    quality_on_training,
)
from candle_p1.reports.speedups import speedups
from candle_p1.reports.statistics import Estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from candle_p1.reports.points import Experiment, Series

IDEAL: dict[str, Any] = {"color": "0.45", "lw": 1.0, "ls": (0, (4, 3)), "label": "ideal"}


def performance(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws loading, training and total time."""
    return _panels(series, (LOAD, TRAIN, TOTAL), same_axis=True)


def quality(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws accuracy or loss on training and test samples, with the naive predictor's.

    Raises:
        MissingDataError: No run was evaluated, or none of these series has a number.
    """
    name = merit(experiment.runs)
    if name is None:
        raise MissingDataError("no run evaluated its model (--eval_bool False)")
    shown = [quality_on_training(name), quality_on_test(name)]
    known = [each for each in shown if _known(series, each)]
    if not known:
        raise MissingDataError(f"in no run the {name} is a number")
    figure = _panels(series, known, zero=False)
    naive = [run.naive[name] for run in experiment.runs if name in run.naive]
    if naive:
        tested, value = figure.axes[-1], median(naive)
        bottom, top = tested.get_ylim()
        margin = 0.05 * max(top - value, value - bottom)
        tested.set_ylim(min(bottom, value - margin), max(top, value + margin))
        tested.axhline(value, color="0.45", lw=1.0, ls=(0, (1, 2)))
        tested.annotate(
            "naive predictor",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize="small",
            color="0.3",
        )
    return figure


def exchange(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws time per epoch, communication's share of training, and POP's efficiencies.

    Raises:
        MissingDataError: All runs had one rank, or none logged its communication.
    """
    if max(experiment.rank_counts) == 1:
        raise MissingDataError("all runs had one worker, which exchanges nothing")
    shown = (EPOCH, COMMUNICATION, LOAD_BALANCE, PARALLEL_EFFICIENCY)
    known = [each for each in shown if _known(series, each)]
    if COMMUNICATION not in known:
        raise MissingDataError("no run logged its communication (--communication_log)")
    return _panels(series, known, columns=2)


def energy(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws energy and mean power.

    Raises:
        MissingDataError: No energy was measured.
    """
    if not _known(series, ENERGY):
        raise MissingDataError("energy was not measured in any run")
    measured = [each for each in series if _known([each], ENERGY)]
    return _panels(measured, [labelled(each, experiment.runs) for each in (ENERGY, POWER)])


def scaling(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws speed-up and efficiency, of total time and of training, with the ideal.

    Raises:
        MissingDataError: No series has two numbers of workers.
    """
    usable = [each for each in series if len(each.timed) > 1]
    if not usable:
        raise MissingDataError("no series was run on two numbers of workers")
    strong = experiment.mode == STRONG
    counts = sorted({point.num_ranks for each in usable for point in each.timed})
    kinds = [False, True] if strong else [True]  # of panels: speed-ups, efficiencies
    figure, plots = new_figure(2 * len(kinds), 2, sharey="row")
    panels = [(is_efficiency, each) for is_efficiency in kinds for each in (TOTAL, TRAIN)]
    for axes, (is_efficiency, quantity) in zip(plots, panels, strict=True):
        highest = 1.0
        for i, each in enumerate(usable):
            marks = _speedup_marks(experiment, each, quantity, is_efficiency=is_efficiency)
            highest = max([highest, *(mark.estimate.high for mark in marks)])
            draw_line(axes, marks, i, len(usable), each.name)
        grows = strong and not is_efficiency
        if experiment.mode != BATCH:
            highest = max(highest, _draw_ideal(axes, counts, grows=grows))
        worker_axis(axes, counts)
        axes.set_title("training alone" if quantity is TRAIN else quantity.title)
        if grows and highest > LOG_FROM:
            log_axis(axes)
        else:
            axes.set_ylim(0, 1.05 * highest)
    for axes, is_efficiency in zip(plots[::2], kinds, strict=True):
        efficiency = "efficiency" if strong else "T(base) / T(P)"
        axes.set_ylabel(efficiency if is_efficiency else "speed-up")
    legend_below(figure, plots[0])
    return figure


def gain(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws the improvement of time and energy over the original, in percent.

    Raises:
        MissingDataError: There is nothing to compare.
    """
    compared = [pair for pair in pairs(experiment) if pair[0] in series and pair[1] in series]
    if not compared:
        raise MissingDataError(
            "no two series differ in the loader or the kernels alone, one of them the original"
        )
    comparable = len(covered(experiment.runs)) == 1
    of_quantity = {
        quantity.title: [_gain_marks(*pair, quantity) for pair in compared]
        for quantity in (TOTAL, *([labelled(ENERGY, experiment.runs)] if comparable else []))
    }
    shown = {title: marks for title, marks in of_quantity.items() if any(marks)}
    if not shown:
        raise MissingDataError("no original and optimised runs on the same number of workers")
    originals = {original.name for original, _ in compared}
    figure, plots = new_figure(len(shown), sharey=True)
    for axes, (title, marks_of) in zip(plots, shown.items(), strict=True):
        for i, ((original, optimised), marks) in enumerate(zip(compared, marks_of, strict=True)):
            against = f" against {original.name}" if len(originals) > 1 else ""
            draw_line(axes, marks, i, len(compared), optimised.name + against)
        axes.axhline(0, color="0.3", lw=0.8)
        worker_axis(axes, experiment.rank_counts)
        axes.set_title(title)
    plots[0].set_ylabel("improvement (%)")
    legend_below(figure, plots[0])
    return figure


def _panels(
    series: Sequence[Series],
    quantities: Sequence[Quantity],
    *,
    columns: int | None = None,
    same_axis: bool = False,
    zero: bool = True,
) -> Figure:
    """Draws a panel per quantity.

    Args:
        series: A line each.
        quantities: Of which a run of these knows each.
        columns: Panels beside each other at most.
        same_axis: Whether all panels have the same values on the y axis.
        zero: Whether it begins at 0.
    """
    figure, plots = new_figure(len(quantities), columns, sharey=same_axis)
    counts = {point.num_ranks for each in series for point in each.timed}
    of_panel = []
    for axes, quantity in zip(plots, quantities, strict=True):
        of_panel.append(_draw(axes, series, quantity))
        worker_axis(axes, counts)
        axes.set_title(quantity.title)
        axes.set_ylabel(quantity.unit)
    if same_axis:
        value_axis(plots, [value for values in of_panel for value in values], zero)
        for axes in plots[1:]:
            axes.set_ylabel("")
    else:
        for axes, values in zip(plots, of_panel, strict=True):
            value_axis([axes], values, zero)
    legend_below(figure, plots[0])
    return figure


def _draw(axes: Axes, series: Sequence[Series], quantity: Quantity) -> list[float]:
    """Draws the lines of a panel; returns all of its values."""
    shown = []
    for i, each in enumerate(series):
        marks = []
        for point in each.timed:
            estimate = point.estimate(quantity.of)
            if estimate is not None:
                marks.append(Mark(point.num_ranks, estimate, point.values(quantity.of)))
        draw_line(axes, marks, i, len(series), each.name)
        shown += [value for mark in marks for value in mark.values]
    return shown


def _gain_marks(original: Series, optimised: Series, quantity: Quantity) -> list[Mark]:
    found = improvements(original, optimised, quantity.of)
    return [Mark(each.num_ranks, each.percent) for each in found if each.num_ranks]


def _speedup_marks(
    experiment: Experiment, series: Series, quantity: Quantity, *, is_efficiency: bool
) -> list[Mark]:
    found = speedups(experiment, series, quantity.of)
    first = [Mark(found[0].base.num_ranks, Estimate(1.0, 1.0, 1.0, 0.0, (1,)))] if found else []
    return first + [
        Mark(each.point.num_ranks, (each.efficiency if is_efficiency else None) or each.speedup)
        for each in found
    ]


def _draw_ideal(axes: Axes, counts: Sequence[int], *, grows: bool) -> float:
    """Draws what ideal scaling gives; returns its highest value."""
    xs = np.geomspace(counts[0], counts[-1], 50)
    ideal = xs / counts[0] if grows else np.ones_like(xs)
    axes.plot(xs, ideal, zorder=1, **IDEAL)
    return float(ideal.max())


def _known(series: Sequence[Series], quantity: Quantity) -> bool:
    return any(point.values(quantity.of) for each in series for point in each.timed)
