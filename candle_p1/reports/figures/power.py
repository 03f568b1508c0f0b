"""Power over time, with the phases of the run behind it, as in the paper's Figure 7(a)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.figures import BLUE, DOTS_PER_INCH, GREEN, PURPLE, VERMILION
from candle_p1.records.power_file import read_traces

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from candle_p1.records.power_trace import Trace
    from candle_p1.reports.points import Series
    from candle_p1.reports.runs import RecordedRun

SIZE_INCHES = (10.0, 4.4)
SHADES = ("#F2F2F2", "#DDE7F0")
LINES = (BLUE, VERMILION, GREEN, PURPLE)
MIN_LABEL_SHARE = 0.04
"""A narrower phase has no room for its name."""


def run_to_draw(series: Series) -> RecordedRun | None:
    """Returns the run of a series with power readings on the most ranks; the median by time."""
    for point in reversed(series.points):
        runs = [run for run in point.all_runs if run.status == "ok" and run.power_files]
        if runs:
            return sorted(runs, key=lambda run: run.total_s or 0.0)[len(runs) // 2]
    return None


def power_figure(run: RecordedRun) -> Figure:
    """Draws power over time, with the phases of rank 0 behind it.

    Raises:
        DataError: A file of readings is missing or damaged.
        RecordError: The values of the ranks are damaged.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    _shade_phases(axes, run)
    draw_power(axes, run)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=4, frameon=False, fontsize=9)
    axes.set(xlabel="seconds since the start of the run", xlim=(0, run.total_s))
    return figure


def _shade_phases(axes: Axes, run: RecordedRun) -> None:
    """Draws a band for each phase of rank 0, with its name where there is room."""
    for i, phase in enumerate(each for each in run.stretches() if not each.within):
        begin, seconds = phase.begin_s[0], phase.seconds[0]
        if np.isnan(begin):
            continue
        axes.axvspan(begin, begin + seconds, color=SHADES[i % len(SHADES)], lw=0)
        if seconds > MIN_LABEL_SHARE * (run.total_s or 0.0):
            axes.text(
                begin + seconds / 2,
                1.01,
                f"{phase.name}\n{seconds:.1f} s",
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=9,
            )


def draw_power(axes: Axes, run: RecordedRun) -> None:
    """Draws the power of every device of a run that has readings.

    Raises:
        DataError: A file of readings is missing or damaged.
    """
    traces = [
        (int(path.stem.removeprefix("power-")), trace)
        for path in run.power_files
        for trace in read_traces(path)
    ]
    for i, (node, trace) in enumerate(traces):
        times_s, watts = mean_power(trace)
        label = f"node {node}: {trace.channel.label}"
        color, style = LINES[i % len(LINES)], "-" if i < len(LINES) else "--"
        axes.step(times_s, watts, where="post", color=color, ls=style, lw=1.2, label=label)
    simulated = run.energy_kind == "simulated"
    axes.set_ylabel("power (W)" + (", simulated" if simulated else ""))
    axes.set_ylim(bottom=0)


def mean_power(trace: Trace) -> tuple[Any, Any]:
    """Returns times and the power from each of them on, in s and W, as float64 of one length.

    The power of an energy counter is the mean until its next reading; a single reading gives none.
    """
    if trace.channel.reading == "power":
        return trace.times_s, trace.values
    if len(trace.times_s) < 2:
        return trace.times_s[:0], trace.values[:0]
    watts = np.diff(trace.values) / np.diff(trace.times_s)
    return trace.times_s, np.append(watts, watts[-1:])
