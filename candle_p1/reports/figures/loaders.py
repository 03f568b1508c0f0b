"""Time to load each file by each loader, as the paper's Tables 3 and 4."""

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
from candle_p1.reports.loading import file_loads, largest_files
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from candle_p1.reports.points import Experiment, Series

MAX_FILES = 3


def loaders(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws a panel per file, a line per loader.

    Raises:
        MissingDataError: All runs loaded alike.
    """
    loads = file_loads(experiment, series)
    methods = list(dict.fromkeys(load.method for load in loads))
    if len(methods) < 2:
        raise MissingDataError("all runs used the same loader")
    files = largest_files(loads, MAX_FILES)
    figure, plots = new_figure(len(files), sharey=True)
    shown: list[float] = []
    for axes, (role, file_mb) in zip(plots, files, strict=True):
        of_file = [load for load in loads if (load.role, load.file_mb) == (role, file_mb)]
        for i, method in enumerate(methods):
            found = [load for load in of_file if load.method == method]
            found.sort(key=lambda load: load.num_ranks)
            marks = [Mark(load.num_ranks, load.estimate, load.seconds) for load in found]
            draw_line(axes, marks, i, len(methods), method)
        shown += [value for load in of_file for value in load.seconds]
        worker_axis(axes, [load.num_ranks for load in of_file])
        axes.set_title(f"{role}, {number(file_mb)} MB")
    plots[0].set_ylabel("s, slowest rank")
    value_axis(plots, shown)
    legend_below(figure, plots[0])
    return figure
