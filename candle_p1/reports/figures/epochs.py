"""Accuracy or loss against the epochs that each worker trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from candle_p1.reports.published import published
from candle_p1.reports.quantities import merit, quality_on_test, quality_on_training
from candle_p1.reports.statistics import estimate_median
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from candle_p1.reports.epochs import EpochGroup
    from candle_p1.reports.points import Experiment, Series

MAX_LINES = 7
"""Of numbers of workers beside each other; with more, they count together."""


def epochs_per_worker(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws quality on training and test samples, with what the paper says is enough.

    Raises:
        MissingDataError: No run was evaluated, none has a number, or all trained the same epochs
            per worker.
    """
    name = merit(experiment.runs)
    if name is None:
        raise MissingDataError("no run evaluated its model (--eval_bool False)")
    groups = [
        (quantity, epoch_groups(experiment, quantity))
        for quantity in (quality_on_training(name), quality_on_test(name))
    ]
    # Under strong scaling the epochs of a worker follow from the number of workers.
    together = experiment.mode == STRONG or any(
        len(_lines(of_quantity, together=False)) > MAX_LINES for _, of_quantity in groups
    )
    shown = [
        (quantity, lines)
        for quantity, of_quantity in groups
        if (lines := _lines(of_quantity, together=together))
    ]
    ticks = {int(mark.x) for _, lines in shown for marks in lines.values() for mark in marks}
    if not ticks:
        raise MissingDataError(f"in no run the {name} is a number")
    if len(ticks) < 2:
        raise MissingDataError("all runs trained the same number of epochs per worker")
    enough = published(experiment.benchmark, experiment.mode, "epochs_needed")
    figure, plots = new_figure(len(shown))
    for axes, (quantity, lines) in zip(plots, shown, strict=True):
        for i, (label, marks) in enumerate(lines.items()):
            draw_line(axes, marks, i, len(lines), label)
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


def _lines(groups: Sequence[EpochGroup], *, together: bool) -> dict[str, list[Mark]]:
    """Returns lines by label: one per group, with all numbers of workers together or each apart."""
    lines: dict[str, list[Mark]] = {}
    for group in groups:
        for epochs, by_workers in group.by_epochs.items():
            values_of = {count(num, "worker"): by_workers[num] for num in sorted(by_workers)}
            if together:
                values_of = {"": group.values(epochs)}
            for workers, values in values_of.items():
                label = ", ".join(part for part in (group.name, workers) if part) or "all runs"
                lines.setdefault(label, []).append(Mark(epochs, estimate_median(values), values))
    return lines
