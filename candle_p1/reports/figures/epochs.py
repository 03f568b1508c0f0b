"""Accuracy or loss against the epochs that each worker trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.published import published
from candle_p1.reports.drawing import (
    Mark,
    draw_line,
    legend_below,
    new_figure,
    value_axis,
    worker_axis,
)
from candle_p1.reports.epochs import epoch_groups
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.points import STRONG
from candle_p1.reports.quantities import merit, quality_on_test, quality_on_training
from candle_p1.reports.words import count
from candle_p1.statistics import estimate_median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from candle_p1.reports.epochs import EpochGroup
    from candle_p1.reports.points import Experiment, Series

MAX_LINES = 7


def epochs_per_worker(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws quality on training and test samples, with what the paper says is enough.

    Raises:
        MissingDataError: No run was evaluated, or all trained the same epochs per worker.
    """
    name = merit(experiment.runs)
    if name is None:
        raise MissingDataError("no run evaluated its model (--eval_bool False)")
    shown = [
        (quantity, lines)
        for quantity in (quality_on_training(name), quality_on_test(name))
        if (lines := _lines(epoch_groups(experiment, quantity), experiment.mode == STRONG))
    ]
    ticks = {int(mark.x) for _, lines in shown for marks in lines.values() for mark in marks}
    if len(ticks) < 2:
        raise MissingDataError("all runs trained the same number of epochs per worker")
    enough = published(experiment.benchmark, experiment.mode, "epochs_needed")
    figure, plots = new_figure(len(shown))
    for axes, (quantity, lines) in zip(plots, shown, strict=True):
        for i, (label, marks) in enumerate(list(lines.items())[:MAX_LINES]):
            draw_line(axes, marks, i, min(len(lines), MAX_LINES), label)
        worker_axis(axes, ticks, "epochs per worker")
        value_axis([axes], [v for marks in lines.values() for m in marks for v in m.values], False)
        axes.set_title(quantity.title)
        for each in enough[:1]:
            if each.value and min(ticks) <= each.value <= max(ticks):
                axes.axvline(each.value, color="0.45", lw=1.0, ls=(0, (1, 2)))
                axes.annotate(
                    f"published: {each.value:g}",
                    (each.value, 0),
                    xycoords=("data", "axes fraction"),
                    xytext=(3, 3),
                    textcoords="offset points",
                    fontsize="small",
                    color="0.3",
                )
    legend_below(figure, plots[0])
    return figure


def _lines(groups: Sequence[EpochGroup], strong: bool) -> dict[str, list[Mark]]:
    """Returns lines by label: under strong scaling one per group, else one per number of workers.

    Under strong scaling the epochs of a worker follow from the number of workers.
    """
    lines: dict[str, list[Mark]] = {}
    for group in groups:
        for epochs, by_workers in group.by_epochs.items():
            for num_ranks, values in sorted(by_workers.items()):
                workers = "" if strong else count(num_ranks, "worker")
                label = ", ".join(part for part in (group.name, workers) if part) or "all runs"
                lines.setdefault(label, []).append(Mark(epochs, estimate_median(values), values))
    return lines
