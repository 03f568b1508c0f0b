"""Power over time, with the phases of the run behind it, as in the paper's Figure 7(a)."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.figures import BLUE, GREEN, PURPLE, VERMILION
from candle_p1.records.power_file import read_traces
from candle_p1.reports.drawing import (
    CHARACTER_INCHES,
    SHADES,
    TITLE_CHARACTERS,
    legend_below,
    new_figure,
)
from candle_p1.reports.words import listed
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from candle_p1.records.power_trace import Trace
    from candle_p1.reports.runs import RecordedRun, Stretch

PANEL_INCHES = (8.0, 2.5)
LINES = (BLUE, VERMILION, GREEN, PURPLE)
MAX_LINES = 2 * len(LINES)
"""The devices that can be told apart."""

DOMAINS = ("gpu", "module", "node", "cpu", "memory")
"""In the order in which devices are drawn: the paper's figure shows GPUs."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run with the power of the first of its nodes that has readings.

    Attributes:
        name: What it is called in the figure.
        node: The number of the node.
        traces: The readings of the devices that are drawn.
        num_others: The number of devices of the node that are not.
        phases: Those of the run, without their parts.
    """

    name: str
    run: RecordedRun
    node: int
    traces: Sequence[Trace]
    num_others: int
    phases: Sequence[Stretch]


def read_measured(name: str, run: RecordedRun) -> MeasuredRun:
    """Reads the power of a run's first node with readings; a job may have thousands of nodes.

    Raises:
        DataError: The file of readings is missing or damaged.
        RecordError: The values of the ranks are damaged.
    """
    path = run.power_files[0]
    traces = sorted(read_traces(path), key=lambda each: DOMAINS.index(each.channel.domain))
    node = int(path.stem.removeprefix("power-"))
    num_others = len(traces[MAX_LINES:])
    return MeasuredRun(name, run, node, traces[:MAX_LINES], num_others, run.whole_phases)


def power_figure(runs: Sequence[MeasuredRun]) -> Figure:
    """Draws power over time, a panel for each run with the phases of rank 0 behind it.

    All panels have the same axes.
    """
    figure, plots = new_figure(len(runs), 1, PANEL_INCHES, sharex=True, sharey=True)
    end_s = max(each.run.total_s or 0.0 for each in runs)
    for axes, each in zip(plots, runs, strict=True):
        axes.set_xlim(0, end_s)
        _shade_phases(axes, each.phases, end_s)
        draw_power(axes, each)
        nodes = f"node {each.node} of {each.run.num_nodes or 1:,}"
        title = f"{each.name}, {count(each.run.num_ranks, 'rank')}, {nodes}"
        axes.set_title(fill(title, TITLE_CHARACTERS), fontsize=9, loc="left", pad=26)
    plots[-1].set_xlabel("seconds since the start of the run")
    legend_below(figure, *plots)
    return figure


def power_caption(runs: Sequence[MeasuredRun]) -> str:
    """Returns what a reader of the figure has to know."""
    kinds = listed(sorted({each.run.energy_kind for each in runs}))
    rates = listed([f"{hz:g}" for hz in sorted({each.run.power_hz or 0.0 for each in runs})])
    others = sum(each.num_others for each in runs)
    return (
        f"One run of each series: {kinds} power of the devices of one node, read at {rates} Hz,"
        " with the phases of rank 0 behind it."
        + (f" {count(others, 'further device')} of these nodes are not drawn." if others else "")
    )


def _shade_phases(axes: Axes, phases: Sequence[Stretch], end_s: float) -> None:
    """Draws a band for each phase of rank 0, with its name where there is room."""
    for i, phase in enumerate(phases):
        begin_s, seconds = phase.begin_s[0], phase.seconds[0]
        if np.isnan(begin_s):
            continue
        axes.axvspan(begin_s, begin_s + seconds, color=SHADES[i % len(SHADES)], lw=0)
        lines = phase.name, f"{seconds:.1f} s"
        width_s = max(map(len, lines)) * CHARACTER_INCHES * end_s / (PANEL_INCHES[0] - 1)
        if seconds > width_s:
            axes.text(
                begin_s + seconds / 2,
                1.01,
                "\n".join(lines),
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=7.5,
            )


def draw_power(axes: Axes, measured: MeasuredRun) -> None:
    """Draws the power of the devices of a node."""
    for i, trace in enumerate(measured.traces):
        times_s, watts = mean_power(trace)
        label = f"node {measured.node}: {trace.channel.label}"
        color, style = LINES[i % len(LINES)], "-" if i < len(LINES) else "--"
        axes.step(times_s, watts, where="post", color=color, ls=style, lw=1.2, label=label)
    simulated = measured.run.energy_kind == "simulated"
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
