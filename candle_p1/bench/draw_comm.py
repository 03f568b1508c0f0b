"""Draws measured communication: times and bus bandwidths over sizes, and a page of both."""

from __future__ import annotations

from math import log10
from typing import TYPE_CHECKING, Any

from candle_p1.bench.show_comm import parts, title_of
from candle_p1.distributed.transports.transport import ALLREDUCE, OPERATIONS
from candle_p1.reports.drawing import (
    CHARACTER_INCHES,
    COLORS,
    LOOK,
    MARKERS,
    legend_below,
    log_axis,
    new_figure,
    to_drawing,
)
from candle_p1.reports.render import page_of, render_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from candle_p1.reports.drawing import Drawing

PANEL_INCHES = (5.0, 2.9)
PLOT_INCHES = 3.9
"""The width of a plot without its labels, at least."""
SAME_INCHES = 0.06
"""Sizes nearer than this share a line's label."""
LEVEL_POINTS = 10
"""The height of a row of labels."""
DENSE_DECADES = 2
TICKS = {
    4: "4 B",
    1 << 6: "64 B",
    1 << 10: "1 KiB",
    1 << 15: "32 KiB",
    1 << 20: "1 MiB",
    1 << 25: "32 MiB",
    1 << 30: "1 GiB",
}


def picture(report: Mapping[str, Any]) -> Drawing:
    """Returns a figure with a row for each operation, and in it a line for each transport.

    Args:
        report: What `candle_p1.bench.comm.CommMeasurement.measure` returned.
    """
    import matplotlib as mpl

    results = report["results"]
    measured = {each["operation"] for each in results}
    operations = [name for name in OPERATIONS if name in measured]
    with mpl.rc_context(LOOK):
        figure, plots = new_figure(2 * len(operations), 2, PANEL_INCHES)
        for row, operation in enumerate(operations):
            chosen = [each for each in results if each["operation"] == operation]
            _draw(plots[2 * row : 2 * row + 2], operation, chosen, report)
        legend_below(figure, *plots[::2])
        return to_drawing(figure, "communication", title_of(report), "")


def page(report: Mapping[str, Any]) -> str:
    """Returns a page, as HTML, with the figure and everything that is printed.

    Args:
        report: See `picture`.
    """
    _, *shown = parts(report)
    return render_page(page_of(title_of(report), shown, [picture(report)]))


def _draw(
    plots: Sequence[Axes],
    operation: str,
    results: Sequence[Mapping[str, Any]],
    report: Mapping[str, Any],
) -> None:
    """Draws the times and the bus bandwidths of an operation."""
    for i, transport in enumerate(report["transports"]):
        mine = [each for each in results if each["transport"] == transport]
        look: dict[str, Any] = {"color": COLORS[i], "marker": MARKERS[i], "markersize": 4, "lw": 1}
        sizes = [each["bytes"] for each in mine]
        label = transport if mine else "_"
        plots[0].plot(sizes, [each["mean_s"] for each in mine], label=label, **look)
        plots[1].plot(sizes, [each["bus_bytes_per_s"] for each in mine], **look)
        for each in mine:
            plots[0].vlines(
                each["bytes"], each["min_s"], each["max_s"], COLORS[i], lw=2.5, alpha=0.4
            )
        for fit in report["fits"]:
            if (fit["transport"], fit["operation"]) == (transport, operation):
                _draw_fit(plots[0], fit, COLORS[i])
    sizes = [each["bytes"] for each in results]
    first, last = min(sizes, default=1), max(sizes, default=1)
    marks = report["gradient_bytes"] if operation == ALLREDUCE else {}
    marks = {name: size for name, size in marks.items() if first <= size <= last}
    for axes, quantity, unit in zip(plots, ("time", "bus bandwidth"), ("s", "B/s"), strict=True):
        axes.set_xscale("log")
        _log_y(axes, unit)
        axes.set_xlim(first / 1.5, last * 1.5)
        ticks = [tick for tick in TICKS if first <= tick <= last] or [first, last]
        axes.set_xticks(ticks, [TICKS.get(tick, f"{tick:,} B") for tick in ticks])
        axes.set_ylabel(quantity)
        levels = _mark(axes, marks, first, last)
        title = OPERATIONS[operation].title
        axes.set_title(title, loc="left", pad=6 + LEVEL_POINTS * levels)


def _log_y(axes: Axes, unit: str) -> None:
    """Makes the y axis logarithmic, with a tick for each decade or, of few decades, for more.

    Values span up to eight decades, so ticks have prefixes of the unit, such as ms and GB/s.
    """
    from matplotlib.ticker import EngFormatter, LogLocator

    low, high = axes.get_ylim()
    log_axis(axes)
    axes.minorticks_off()
    if low <= 0 or high > 10**DENSE_DECADES * low:
        axes.yaxis.set_major_locator(LogLocator(numticks=12))
    axes.yaxis.set_major_formatter(EngFormatter(unit))


def _draw_fit(axes: Axes, fit: Mapping[str, Any], color: str) -> None:
    """Draws the fitted lines of the ranges of sizes."""
    for line in fit["ranges"]:
        rate, sizes = line["bandwidth_bytes_per_s"], [line["first_bytes"]]
        while sizes[-1] < line["last_bytes"]:
            sizes.append(min(2 * sizes[-1], line["last_bytes"]))
        times = [line["latency_s"] + (size / rate if rate else 0.0) for size in sizes]
        axes.plot(sizes, times, ":", color=color, lw=1.5, alpha=0.8)


def _mark(axes: Axes, marks: Mapping[str, int], first: int, last: int) -> int:
    """Draws a line at each size, with labels above the plot; returns in how many rows they are."""
    placed = place_labels(marks, PLOT_INCHES / log10(1.5**2 * last / first))
    for size in marks.values():
        axes.axvline(size, color="0.6", lw=0.8, ls="--", zorder=0)
    for label, size, level in placed:
        axes.annotate(
            label,
            (size, 1),
            (0, 3 + LEVEL_POINTS * level),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            annotation_clip=False,
        )
    return 1 + max((level for _, _, level in placed), default=-1)


def place_labels(marks: Mapping[str, int], inches_per_decade: float) -> list[tuple[str, int, int]]:
    """Returns labels for sizes on a logarithmic axis that do not overlap.

    Args:
        marks: The sizes, by what they are called.
        inches_per_decade: The scale of the axis.

    Returns:
        For each label its text, which has the names of sizes that are almost the same, its place,
        and the row above the plot in which it is, from 0.
    """
    groups: list[tuple[list[str], int]] = []
    for name, size in sorted(marks.items(), key=lambda item: item[1]):
        if groups and log10(size / groups[-1][1]) * inches_per_decade < SAME_INCHES:
            groups[-1][0].append(name)
        else:
            groups.append(([name], size))
    placed: list[tuple[str, int, int]] = []
    ends: list[float] = []
    for names, size in groups:
        label = ", ".join(names)
        middle = log10(size) * inches_per_decade
        half = CHARACTER_INCHES * (len(label) + 1) / 2
        level = next((i for i, end in enumerate(ends) if end <= middle - half), len(ends))
        ends[level : level + 1] = [middle + half]
        placed.append((label, size, level))
    return placed
