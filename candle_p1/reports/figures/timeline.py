"""Communication over time in traced runs, as in the paper's Figures 7(b), 12 and 19."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.errors import DataError
from candle_p1.figures import BLUE, GREEN, PURPLE, VERMILION
from candle_p1.reports.drawing import (
    CHARACTER_INCHES,
    SHADES,
    TITLE_CHARACTERS,
    legend_below,
    look_of,
    new_figure,
)
from candle_p1.reports.frame import MissingDataError, PhaseSpan, Run
from candle_p1.reports.timeline.events import NEGOTIATE, OPERATIONS, TRANSFER, US_PER_S, Activity
from candle_p1.reports.timeline.steps import CoverageUnion
from candle_p1.reports.timeline.summary import TimelineSummary, summarize
from candle_p1.reports.words import number
from candle_p1.text import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, ROW_INCHES, BESIDE_INCHES = 8.0, 0.2, 0.55
PHASES, OVERHEAD = "phases of rank 0", "broadcast overhead"
STAGES = {NEGOTIATE: "negotiation", TRANSFER: "transfer by"}
COLORS = {"broadcast": VERMILION, "allreduce": BLUE}
WAITING, TRANSFERRING = "waiting for the slowest loader", "broadcast of the weights"
LOOKS: dict[str, Any] = {
    WAITING: look_of("wait"),
    TRANSFERRING: {"color": PURPLE, "linewidth": 1.0, "edgecolor": PURPLE},
}
BAND: Any = {"edgecolor": "0.6", "linewidth": 0.5}
HEIGHT = 0.8
LIGHT: Any = {"alpha": 0.35, "lw": 0.8}
"""The line makes visible what is shorter than a pixel."""

STEP = 0.05
"""Shares are rounded to multiples of this, of which none is visible."""


@dataclass(frozen=True)
class TracedRun:
    """A run, by the name that it has in the figure, with what its timeline says.

    `zero_s` is when the timeline's clock was 0, in seconds from the start of the run.
    """

    name: str
    run: Run
    timeline: TimelineSummary
    zero_s: float
    phases: Sequence[PhaseSpan]


def read_traced(name: str, run: Run) -> TracedRun:
    """Reads the timeline of a traced run.

    Raises:
        MissingDataError: The timeline is missing, damaged or empty.
        RecordError: Its raw values are damaged.
    """
    path, clock = run.timeline_file, run.record.timeline
    if path is None or clock is None:
        raise MissingDataError(
            f"{run['record']}: the timeline of this run is not beside its record"
        )
    try:
        timeline = summarize(path)
    except DataError as error:
        # A record names any file; what is in one that is no timeline is not shown.
        reason = str(error) if path.parent == run.path.parent else "is not a timeline"
        raise MissingDataError(f"{run['record']}: {path}: {reason}") from error
    if timeline.origin_epoch_us is None or not timeline.rows:
        raise MissingDataError(f"{run['record']}: its timeline is empty")
    zero_s = clock.anchor_s + (timeline.origin_epoch_us - clock.anchor_epoch_us) / US_PER_S
    phases = [each for each in run.phase_spans() if not each.within]
    return TracedRun(name, run, timeline, zero_s, phases)


def timeline_figure(runs: Sequence[TracedRun]) -> Figure:
    """Draws a panel for each run, one above the other, with a common time axis."""
    rows = sorted({row for each in runs for row in each.timeline.rows}, key=_order)
    labels = [PHASES, OVERHEAD, *map(_label, rows)]
    size = (WIDTH_INCHES, BESIDE_INCHES + ROW_INCHES * len(labels))
    figure, plots = new_figure(len(runs), 1, size, sharex=True)
    end_s = max(each.run["total_s"] or each.zero_s + each.timeline.end_s for each in runs)
    for axes, each in zip(plots, runs, strict=True):
        axes.set_xlim(0, end_s)
        axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)
        truncated = "; its timeline is truncated" if each.timeline.cut else ""
        ranks = count(each.run["num_ranks"], "rank")
        axes.set_title(fill(f"{each.name}, {ranks}{truncated}", TITLE_CHARACTERS), fontsize=9)
        _draw_phases(axes, each.phases, end_s)
        _draw_overhead(axes, each, end_s)
        for i, row in enumerate(rows, 2):
            if row in each.timeline.rows:
                color = COLORS.get(row.operation or "", GREEN)
                _draw_row(axes, i, each.timeline.rows[row], each.zero_s, color)
    for label, look in LOOKS.items():
        plots[0].barh(0, 0, label=label, **look)
    plots[-1].set_xlabel("seconds since the start of the run")
    legend_below(figure, plots[0])
    return figure


def phase_bands(phases: Sequence[PhaseSpan]) -> Iterator[tuple[str, float, float, str]]:
    """Yields name, begin and seconds of each phase of rank 0 whose begin is known, and a shade."""
    for i, phase in enumerate(phases):
        if not np.isnan(phase.begin_s[0]):
            yield phase.name, phase.begin_s[0], phase.seconds[0], SHADES[i % len(SHADES)]


def _order(row: Activity) -> tuple[bool, int, int, str]:
    """Sort key: the broadcast first, then the allreduce; negotiation before operation."""
    operations = ["broadcast", *OPERATIONS.values()]
    known = row.operation in operations
    stages = [NEGOTIATE, row.operation, TRANSFER]
    place = operations.index(row.operation or "") if known else 0
    return not known, place, stages.index(row.kind), row.library or ""


def _label(row: Activity) -> str:
    if row.kind == row.operation:
        return row.operation
    return f"{row.operation}: {STAGES[row.kind]} {row.library or ''}".rstrip()


def _draw_phases(axes: Axes, phases: Sequence[PhaseSpan], end_s: float) -> None:
    for name, begin_s, seconds, shade in phase_bands(phases):
        axes.barh(0, seconds, left=begin_s, height=HEIGHT, color=shade, **BAND)
        if _width_s(name, end_s) < seconds:
            place = begin_s + seconds / 2, 0
            axes.text(*place, name, ha="center", va="center_baseline", fontsize=7)


def _draw_overhead(axes: Axes, each: TracedRun, end_s: float) -> None:
    """Draws the waiting and the broadcast in the second row, with their seconds beside them."""
    broadcast = each.timeline.broadcast
    if broadcast is None:
        return
    whole = broadcast.after(each.run["broadcast_wait_s"] or 0.0)
    phase = (each.run.record.phases or {}).get("broadcast")
    wait = (phase.regions or {}).get("wait") if phase else None
    first_s = each.zero_s + broadcast.begin_s
    last_s = first_s + broadcast.overhead_s
    spans = [
        (first_s, broadcast.waiting_s, WAITING),
        (last_s - broadcast.broadcast_s, broadcast.broadcast_s, TRANSFERRING),
    ]
    if wait and wait.begin:
        first_s = wait.begin.min_s
        spans.insert(0, (first_s, wait.max_s, WAITING))
    for begin_s, seconds, label in spans:
        axes.barh(1, seconds, left=begin_s, height=HEIGHT, **LOOKS[label])
    text = (
        f"{number(whole.overhead_s)} s: {number(whole.waiting_s)} s waiting,"
        f" {number(whole.broadcast_s)} s broadcasting"
    )
    is_left = last_s + _width_s(text, end_s) > end_s and first_s > end_s - last_s
    place, offset, align = (first_s, -4, "right") if is_left else (last_s, 4, "left")
    look: Any = {"textcoords": "offset points", "va": "center_baseline", "fontsize": 7.5}
    axes.annotate(text, (place, 1), (offset, 0), ha=align, **look)


def _width_s(text: str, end_s: float) -> float:
    return len(text) * CHARACTER_INCHES * end_s / (WIDTH_INCHES - 2)


def _draw_row(axes: Axes, i: int, union: CoverageUnion, zero_s: float, color: str) -> None:
    shares, piece_s = union.shares, union.piece_us / US_PER_S
    ends = np.flatnonzero(np.diff(shares > 0, prepend=False, append=False)).reshape(-1, 2)
    spans_s = np.column_stack([zero_s + ends[:, 0] * piece_s, np.diff(ends) * piece_s])
    place = i - HEIGHT / 2, HEIGHT
    axes.broken_barh(spans_s.tolist(), place, facecolor=color, edgecolor=color, **LIGHT)
    heights = np.round(shares / STEP) * STEP * HEIGHT
    edges = np.flatnonzero(np.diff(heights, prepend=0, append=0))
    if len(edges):
        base = i + HEIGHT / 2
        tops, times_s = base - heights[edges[:-1]], zero_s + edges * piece_s
        axes.stairs(tops, times_s, baseline=base, fill=True, color=color)
