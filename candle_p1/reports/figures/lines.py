"""Figures of lines: quantities over the number of ranks, or over the epochs per rank."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.reports.drawing import LOG_FROM, Mark, Panel, line_figure, log_axis
from candle_p1.reports.epochs import epoch_groups
from candle_p1.reports.gains import NO_OTHER_PAIR, improvements, pairs, speedups
from candle_p1.reports.loading import file_loads, largest_files
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.points import BATCH, STRONG
from candle_p1.reports.published import published_epochs
from candle_p1.reports.quantities import (
    COMMUNICATION,
    ENERGY,
    EPOCH,
    GPU_ENERGY,
    GPU_POWER,
    LOAD,
    LOAD_BALANCE,
    NODE_ENERGY,
    NODE_POWER,
    NOT_EVALUATED,
    PARALLEL_EFFICIENCY,
    TOTAL,
    TRAIN,
    Quantity,
    comparable_energy,
    labelled,
    merit,
    qualities,
)
from candle_p1.reports.statistics import Estimate, estimate_median
from candle_p1.reports.words import number
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from candle_p1.reports.epochs import EpochGroup
    from candle_p1.reports.points import Experiment, Series

REFERENCE: dict[str, Any] = {"color": "0.45", "lw": 1.0, "ls": (0, (1, 2))}
BESIDE_REFERENCE: dict[str, Any] = {
    "textcoords": "offset points",
    "fontsize": "small",
    "color": "0.3",
}
MAX_LINES = 7
"""With more numbers of ranks than this in a plot over epochs, their runs are counted together."""

MAX_FILES = 3


def performance(_experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws loading, training and total time."""
    first, *others = (_panel(series, quantity) for quantity in (LOAD, TRAIN, TOTAL))
    shown = [Panel(first.title, first.lines, "time (s)")]
    return line_figure([*shown, *(Panel(p.title, p.lines) for p in others)], same_y=True)


def quality(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws accuracy or loss on training and test samples, with the naive predictor's.

    Raises:
        MissingDataError: No run was evaluated, or none of these series has a number.
    """
    name = merit(experiment.runs)
    if name is None:
        raise MissingDataError(NOT_EVALUATED)
    known = _known(series, qualities(name))
    if not known:
        raise MissingDataError(f"the {name} is not a number in any run")
    figure = line_figure([_panel(series, each) for each in known], from_zero=False)
    naive = [run.naive[name] for run in experiment.runs if name in run.naive]
    if naive:
        tested, value = figure.axes[-1], median(naive)
        bottom, top = tested.get_ylim()
        margin = 0.05 * max(top - value, value - bottom)
        tested.set_ylim(min(bottom, value - margin), max(top, value + margin))
        tested.axhline(value, **REFERENCE)
        tested.annotate(
            "naive predictor",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            ha="right",
            **BESIDE_REFERENCE,
        )
    return figure


def epochs_per_rank(experiment: Experiment, _series: Sequence[Series]) -> Figure:
    """Draws quality over the epochs per rank, with the number that the paper found necessary.

    Raises:
        MissingDataError: No run was evaluated, none has a number, or all trained the same number
            of epochs per rank.
    """
    name = merit(experiment.runs)
    if name is None:
        raise MissingDataError(NOT_EVALUATED)
    groups = {each.title: epoch_groups(experiment, each) for each in qualities(name)}
    # Under strong scaling the epochs per rank follow from the number of ranks.
    together = experiment.mode == STRONG or any(
        len(_epoch_lines(each, together=False)) > MAX_LINES for each in groups.values()
    )
    lines = {title: _epoch_lines(each, together=together) for title, each in groups.items()}
    panels = [Panel(title, of_title) for title, of_title in lines.items() if of_title]
    ticks = {mark.x for panel in panels for mark in panel.marks}
    if not ticks:
        raise MissingDataError(f"the {name} is not a number in any run")
    if len(ticks) < 2:
        raise MissingDataError("all runs trained the same number of epochs per rank")
    figure = line_figure(panels, x_label="epochs per rank", from_zero=False)
    needed = published_epochs(experiment)
    if needed and min(ticks) <= needed <= max(ticks):
        for axes in figure.axes:
            axes.axvline(needed, **REFERENCE)
            axes.annotate(
                f"published: {needed}",
                (needed, 0),
                xycoords=("data", "axes fraction"),
                xytext=(3, 3),
                **BESIDE_REFERENCE,
            )
    return figure


def communication(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws time per epoch, communication's share of training, and POP's efficiencies.

    Raises:
        MissingDataError: All runs had one rank, or none logged its communication.
    """
    if max(experiment.rank_counts) == 1:
        raise MissingDataError("all runs had one rank, which does not communicate")
    known = _known(series, (EPOCH, COMMUNICATION, LOAD_BALANCE, PARALLEL_EFFICIENCY))
    if COMMUNICATION not in known:
        raise MissingDataError("no run logged its communication (--communication_log)")
    return line_figure([_panel(series, each) for each in known], columns=2)


def energy(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws energy and mean power, per GPU and per node.

    Raises:
        MissingDataError: No energy was measured.
    """
    measured = [each for each in series if _known([each], (ENERGY,))]
    if not measured:
        raise MissingDataError("energy was not measured in any run")
    pairs = (GPU_ENERGY, GPU_POWER, NODE_ENERGY, NODE_POWER)
    shown = (labelled(each, experiment.runs) for each in _known(measured, pairs))
    return line_figure([_panel(measured, each) for each in shown], columns=2)


def scaling(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws speed-up and scaling efficiency, of the total time and of training, with the ideal.

    Raises:
        MissingDataError: No series has two numbers of ranks.
    """
    usable = [each for each in series if len(each.timed) > 1]
    if not usable:
        raise MissingDataError("no series was run on two numbers of ranks")
    strong = experiment.mode == STRONG
    counts = sorted({point.num_ranks for each in usable for point in each.timed})
    panels: list[Panel] = []
    for kind in ("speed-up", "scaling efficiency") if strong else ("T(base) / T(P)",):
        for quantity, y_label in ((TOTAL, kind), (TRAIN, "")):
            lines = {
                each.name: _speedup_marks(experiment, each, quantity, kind == "scaling efficiency")
                for each in usable
            }
            title = "training alone" if quantity is TRAIN else quantity.title
            ideal = _ideal(experiment, counts, grows=kind == "speed-up")
            panels.append(Panel(title, lines, y_label, ideal))
    figure = line_figure(panels, columns=2, same_y="row", from_zero=None)
    for i, (axes, panel) in enumerate(zip(figure.axes, panels, strict=True)):
        highest = max(
            [1.0, *(mark.estimate.high for mark in panel.marks), *(y for _, y in panel.ideal)]
        )
        if strong and i < 2 and highest > LOG_FROM:
            log_axis(axes)
        else:
            axes.set_ylim(0, 1.05 * highest)
    return figure


def gain(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws the improvement of time and energy over the paper's loaders, in percent.

    Raises:
        MissingDataError: There is nothing to compare.
    """
    compared = [each for each in pairs(experiment) if each.base in series and each.other in series]
    if not compared:
        raise MissingDataError(NO_OTHER_PAIR)
    bases = list(dict.fromkeys(pair.base_settings for pair in compared))
    panels: list[Panel] = []
    for quantity in (TOTAL, *(energy for _, energy in comparable_energy(experiment.runs))):
        for base in bases:
            lines: dict[str, list[Mark]] = {pair.other.name: [] for pair in compared}
            for pair in compared:
                if pair.base_settings == base:
                    lines[pair.other.name] += [
                        Mark(each.num_ranks, each.percent)
                        for each in improvements(*pair, quantity.of)
                        if each.num_ranks
                    ]
            title = f"{quantity.title}\nagainst {base}" if len(bases) > 1 else quantity.title
            if any(lines.values()):
                is_first = base == bases[0] if len(bases) > 1 else not panels
                panels.append(Panel(title, lines, "improvement (%)" if is_first else ""))
    if not panels:
        raise MissingDataError("the series to compare have no runs on the same number of ranks")
    columns = len(bases) if len(bases) > 1 else None
    figure = line_figure(panels, columns=columns, same_y=True, from_zero=None)
    for axes in figure.axes:
        axes.axhline(0, color="0.3", lw=0.8)
    return figure


def loaders(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws the time to load each file, with a line per loader: the paper's Tables 3 and 4.

    Raises:
        MissingDataError: All runs used the same loader.
    """
    loads = file_loads(experiment, series)
    methods = list(dict.fromkeys(load.method for load in loads))
    if len(methods) < 2:
        raise MissingDataError("all runs used the same loader")
    panels: list[Panel] = []
    for role, file_mb in largest_files(loads, MAX_FILES):
        lines = {
            method: [
                Mark(load.num_ranks, load.estimate, load.seconds)
                for load in loads
                if (load.role, load.file_mb, load.method) == (role, file_mb, method)
            ]
            for method in methods
        }
        title = f"{role}, {number(file_mb)} MB"
        panels.append(Panel(title, lines, "" if panels else "slowest rank (s)"))
    return line_figure(panels, same_y=True)


def _panel(series: Sequence[Series], quantity: Quantity) -> Panel:
    """Returns the panel of a quantity, with a line per series."""
    lines = {
        each.name: [
            Mark(point.num_ranks, estimate, point.values(quantity.of))
            for point in each.timed
            if (estimate := point.estimate(quantity.of))
        ]
        for each in series
    }
    return Panel(quantity.title, lines, quantity.unit)


def _known(series: Sequence[Series], quantities: Sequence[Quantity]) -> list[Quantity]:
    """Returns the quantities that some point of these series has."""
    points = [point for each in series for point in each.timed]
    return [each for each in quantities if any(point.values(each.of) for point in points)]


def _epoch_lines(groups: Sequence[EpochGroup], *, together: bool) -> dict[str, list[Mark]]:
    """Returns lines by label: one per group, or with `together` False per number of ranks."""
    lines: dict[str, list[Mark]] = {}
    for group in groups:
        for epochs, by_ranks in group.by_epochs.items():
            values_of = {count(num, "rank"): by_ranks[num] for num in sorted(by_ranks)}
            if together:
                values_of = {"": group.values(epochs)}
            for ranks, values in values_of.items():
                label = ", ".join(part for part in (group.name, ranks) if part) or "all runs"
                lines.setdefault(label, []).append(Mark(epochs, estimate_median(values), values))
    return lines


def _speedup_marks(
    experiment: Experiment, series: Series, quantity: Quantity, is_efficiency: bool
) -> list[Mark]:
    found = speedups(experiment, series, quantity.of)
    first = [Mark(found[0].base.num_ranks, Estimate(1.0, 1.0, 1.0, 0.0, (1,)))] if found else []
    return first + [
        Mark(each.point.num_ranks, (each.efficiency if is_efficiency else None) or each.speedup)
        for each in found
    ]


def _ideal(
    experiment: Experiment, counts: Sequence[int], *, grows: bool
) -> list[tuple[float, float]]:
    """Returns the curve of ideal scaling; none where the batch size grows."""
    xs = np.geomspace(counts[0], counts[-1], 50).tolist()
    return [] if experiment.mode == BATCH else [(x, x / counts[0] if grows else 1.0) for x in xs]
