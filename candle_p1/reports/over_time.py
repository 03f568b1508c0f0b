"""Figures over time: what each rank does when, power, communication; and those of one run.

Communication in traced runs is drawn as in the paper's Figures 7(b), 12 and 19. Each figure raises
MissingDataError where the records lack what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.errors import CandleError, DataError
from candle_p1.figures import BLUE, GREEN, PURPLE, VERMILION, curves
from candle_p1.records.power_trace import Trace, read_traces
from candle_p1.records.record import PER_RANK_NAME
from candle_p1.reports.drawing import (
    COLORS,
    LOOK,
    PHASES,
    Drawing,
    legend_below,
    look_of,
    new_figure,
    to_drawing,
)
from candle_p1.reports.experiments import Experiment, Series
from candle_p1.reports.frame import MissingDataError, PhaseSpan, Run
from candle_p1.reports.horovod_timeline import CoverageUnion, TimelineSummary, summarize
from candle_p1.reports.published import published
from candle_p1.reports.statistics import contents, listed, number
from candle_p1.reports.timeline_events import NEGOTIATE, OPERATIONS, TRANSFER, US_PER_S, Activity
from candle_p1.text import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADES = ("#F2F2F2", "#DDE7F0")
"""The backgrounds of the phases of a run, in turn."""

CHARACTER_INCHES = 0.065
"""The width of a character of a small label, at most."""

TITLE_CHARACTERS = 100
IN_PARTS = "broadcast"
"""The phase of which the parts are drawn."""

MAX_ROWS = 12
WIDTH_INCHES = 8.0
MAX_LINES = 8
"""The devices that can be told apart: four colours, as solid and as dashed lines."""

DOMAINS = ("gpu", "module", "node", "cpu", "memory")
"""In the order in which devices are drawn: the paper's figure shows GPUs."""

STAGES = {NEGOTIATE: "negotiation", TRANSFER: "transfer by"}
WAITING, TRANSFERRING = "waiting for the slowest loader", "broadcast of the weights"
LOOKS: dict[str, Any] = {
    WAITING: look_of("wait"),
    TRANSFERRING: {"color": PURPLE, "linewidth": 1.0, "edgecolor": PURPLE},
}
HEIGHT = 0.8
SHARE_STEP = 0.05
"""Shares are rounded to multiples of this, of which none is visible."""


def ranks_over_time(_experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws a panel per series with a row per rank: the median run on the most ranks."""
    several = [each for each in series if each.timed[-1].num_ranks > 1]
    if not several:
        raise MissingDataError("all runs had one rank, which waits for no other")
    runs = {each.name: median_run(each.timed[-1].runs["run"]) for each in several}
    runs = {name: run for name, run in runs.items() if run.per_rank}
    if not runs:
        raise MissingDataError(f"the times of individual ranks are missing ({PER_RANK_NAME})")
    num_rows = max(len(chosen_ranks(run)) for run in runs.values())
    figure, plots = _panels_over_time(len(runs), (7.4, 0.75 + 0.16 * num_rows))
    for axes, (name, run) in zip(plots, runs.items(), strict=True):
        _draw_ranks(axes, run, lambda phase: PHASES.get(phase.name, (phase.name,))[0])
        axes.set_title(f"{name}, {count(run['num_ranks'], 'rank')}", fontsize=9)
    legend_below(figure, *plots)
    return figure


def phases_figure(run: Run) -> Figure:
    """Draws the phases of each rank over time, above the power of a node where it was measured."""
    if not any(run.phase_spans()):
        raise MissingDataError(f"{run['record']}: the times of its ranks are not beside the record")
    is_measured = run["energy_kind"] != "absent" and bool(run.power_files)
    num_rows = max(len(chosen_ranks(run)), 10 if is_measured else 4)
    figure, plots = _panels_over_time(1 + is_measured, (7.4, 0.75 + 0.16 * num_rows))
    _draw_ranks(plots[0], run, lambda phase: f"{phase.name}, {number(phase.seconds.max())} s")
    if is_measured:
        _draw_power(plots[1], run, _traces(run))
    plots[0].set_xlim(0, run["total_s"])
    legend_below(figure, *plots)
    return figure


def _panels_over_time(
    num: int, inches: tuple[float, float], **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Returns a figure and its panels, one above the other."""
    figure, plots = new_figure(num, 1, inches, sharex=True, **shared)
    plots[-1].set_xlabel("seconds since the start of the run")
    return figure, plots


def chosen_ranks(run: Run) -> list[int]:
    """Returns all ranks; of many, evenly spaced ones and the fastest and slowest at loading."""
    if run["num_ranks"] <= MAX_ROWS:
        return list(range(run["num_ranks"]))
    chosen = set(np.linspace(0, run["num_ranks"] - 1, MAX_ROWS).round().astype(int).tolist())
    for each in run.phase_spans():
        if each.name == "load" and not each.within:
            chosen |= {int(np.argmin(each.seconds)), int(np.argmax(each.seconds))}
    return sorted(chosen)


def _draw_ranks(axes: Axes, run: Run, title_of: Callable[[PhaseSpan], str]) -> None:
    ranks = chosen_ranks(run)
    phases = [each for each in run.phase_spans() if each.within in ("", IN_PARTS)]
    has_parts = any(each.within for each in phases)
    for i, each in enumerate(phases):
        begin_s = each.begin_s[ranks]
        rows = np.flatnonzero(~np.isnan(begin_s))
        if len(rows) and not (has_parts and each.name == IN_PARTS):
            bars = look_of(each.name, COLORS[i % len(COLORS)])
            bars |= {"height": 0.9, "label": title_of(each)}
            axes.barh(rows, each.seconds[ranks][rows], left=begin_s[rows], **bars)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks], fontsize=7)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_ylabel("rank")
    axes.grid(visible=False)


def median_run(runs: Iterable[Run]) -> Run:
    """Returns the run with the median time."""
    in_order = sorted(runs, key=lambda run: run["total_s"] or 0.0)
    return in_order[len(in_order) // 2]


def has_power(run: Run) -> bool:
    """Returns whether there are readings of power beside the record of a run that finished."""
    return run["status"] == "ok" and bool(run.power_files)


def is_traced(run: Run) -> bool:
    """Returns whether Horovod wrote a timeline of a run that finished."""
    return run["status"] == "ok" and run.record.timeline is not None


def median_runs(series: Series, has: Callable[[Run], bool]) -> dict[int, Run]:
    """Returns by number of ranks the run with the median time of those that have something."""
    found = {point.num_ranks: list(filter(has, point.all_runs["run"])) for point in series.points}
    return {num_ranks: median_run(runs) for num_ranks, runs in found.items() if runs}


def _read(
    series: Sequence[Series], has: Callable[[Run], bool], read: Callable[[str, Run], Any]
) -> tuple[list[Any], str]:
    """Reads one run of each series, on as many ranks where they can; and says which it cannot."""
    runs = {each.name: median_runs(each, has) for each in series}
    common = set.intersection(*map(set, runs.values()))
    panels, problems = [], []
    for name, by_ranks in runs.items():
        try:
            panels.append(read(name, by_ranks[max(common or by_ranks)]))
        except CandleError as error:
            problems.append(str(error))
    if not panels:
        raise MissingDataError("; ".join(problems))
    return panels, "".join(f" Not drawn: {problem}." for problem in problems)


def power_over_time(_experiment: Experiment, series: Sequence[Series]) -> tuple[Figure, str]:
    """Draws power over time, a panel for each series with the phases of rank 0 behind it."""

    def read(name: str, run: Run) -> tuple[str, Run, list[Trace], list[PhaseSpan]]:
        return name, run, _traces(run), [each for each in run.phase_spans() if not each.within]

    shown, problems = _read(series, has_power, read)
    figure, plots = _panels_over_time(len(shown), (WIDTH_INCHES, 2.5), sharey=True)
    runs = [run for _, run, _, _ in shown]
    end_s = max(run["total_s"] or 0.0 for run in runs)
    for axes, (name, run, traces, phases) in zip(plots, shown, strict=True):
        axes.set_xlim(0, end_s)
        _shade_phases(axes, phases, end_s)
        _draw_power(axes, run, traces)
        ranks, nodes = count(run["num_ranks"], "rank"), run["num_nodes"] or 1
        title = fill(f"{name}, {ranks}, node {_node(run)} of {nodes:,}", TITLE_CHARACTERS)
        axes.set_title(title, fontsize=9, loc="left", pad=26)
    legend_below(figure, *plots)
    kinds = listed(sorted({run["energy_kind"] for run in runs}))
    rates = listed([f"{hz:g}" for hz in sorted({run["power_hz"] or 0.0 for run in runs})])
    others = sum(len(traces[MAX_LINES:]) for _, _, traces, _ in shown)
    caption = contents()["figures"]["power"]["caption"].format(kinds=kinds, rates=rates)
    if others:
        caption += f" {count(others, 'further device')} of these nodes are not drawn."
    return figure, caption + problems


def timeline_over_time(experiment: Experiment, series: Sequence[Series]) -> tuple[Figure, str]:
    """Draws the communication of traced runs over time, one above the other."""
    runs, problems = _read(series, is_traced, read_traced)
    loaders = {each.run["loader"] for each in runs}
    told = map(str, published(experiment, "broadcast_overhead_s", loaders=loaders))
    caption = contents()["figures"]["timeline"]["caption"] + problems
    return timeline_figure(runs), caption + "".join(f" {t[0].upper()}{t[1:]}." for t in told)


def _shade_phases(axes: Axes, phases: Sequence[PhaseSpan], end_s: float) -> None:
    """Draws a band for each phase of rank 0, with its name where there is room."""
    for name, begin_s, seconds, shade in phase_bands(phases):
        axes.axvspan(begin_s, begin_s + seconds, color=shade, lw=0)
        lines = name, f"{seconds:.1f} s"
        width_s = max(map(len, lines)) * CHARACTER_INCHES * end_s / (WIDTH_INCHES - 1)
        if seconds > width_s:
            look: Any = {"ha": "center", "va": "bottom", "fontsize": 7.5}
            place = axes.get_xaxis_transform()
            axes.text(begin_s + seconds / 2, 1.01, "\n".join(lines), transform=place, **look)


def _traces(run: Run) -> list[Trace]:
    """Reads the power of a run's first node with readings; a job may have thousands of nodes."""
    traces = read_traces(run.power_files[0])
    return sorted(traces, key=lambda each: DOMAINS.index(each.channel.domain))


def _node(run: Run) -> int:
    return int(run.power_files[0].stem.removeprefix("power-"))


def _draw_power(axes: Axes, run: Run, traces: Sequence[Trace]) -> None:
    """Draws the power of the devices of a node, as many as can be told apart.

    That of an energy counter is the mean until its next reading; a single reading gives none.
    """
    for i, trace in enumerate(traces[:MAX_LINES]):
        watts = trace.values
        if trace.channel.reading != "power":
            if len(watts) < 2:
                continue
            watts = np.diff(watts) / np.diff(trace.times_s)
            watts = np.append(watts, watts[-1:])
        look: Any = {"color": COLORS[i % 4], "ls": "-" if i < 4 else "--", "lw": 1.2}
        label = f"node {_node(run)}: {trace.channel.label}"
        axes.step(trace.times_s, watts, where="post", label=label, **look)
    simulated = ", simulated" * (run["energy_kind"] == "simulated")
    axes.set_ylabel(f"power (W){simulated}")
    axes.set_ylim(bottom=0)


def run_figures(run: Run) -> tuple[list[Drawing], list[tuple[str, str]]]:
    """Returns the figures of a run, and the titles of those that cannot be drawn, with reasons."""

    def communication(run: Run) -> Figure:
        return timeline_figure([read_traced(run["benchmark"], run)])

    kinds = {"phases": ("Phases", phases_figure), "curves": ("Training", _curves)}
    if run.record.timeline:
        kinds["timeline"] = ("Communication over time", communication)
    drawn, missing = [], []
    for slug, (title, draw) in kinds.items():
        try:
            drawn.append(_drawn(run, slug, title, draw))
        except CandleError as error:
            missing.append((title, str(error)))
    return drawn, missing


def phases_svg(run: Run) -> str:
    """Returns the picture of the phases and the power, as SVG in which text remains text.

    Raises:
        CandleError: It cannot be drawn.
    """
    return _drawn(run, "phases", "", phases_figure).svg


def _drawn(run: Run, slug: str, title: str, draw: Callable[[Run], Figure]) -> Drawing:
    import matplotlib as mpl

    with mpl.rc_context(LOOK):
        return to_drawing(draw(run), slug, title, "")


def _curves(run: Run) -> Figure:
    if not run.history:
        raise MissingDataError("no epoch was recorded")
    return curves(run.history, title="")


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
    labels = ["phases of rank 0", "broadcast overhead", *map(_label, rows)]
    figure, plots = _panels_over_time(len(runs), (WIDTH_INCHES, 0.55 + 0.2 * len(labels)))
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
                colors = {"broadcast": VERMILION, "allreduce": BLUE}
                color = colors.get(row.operation or "", GREEN)
                _draw_row(axes, i, each.timeline.rows[row], each.zero_s, color)
    for label, look in LOOKS.items():
        plots[0].barh(0, 0, label=label, **look)
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
        look: Any = {"height": HEIGHT, "color": shade, "edgecolor": "0.6", "linewidth": 0.5}
        axes.barh(0, seconds, left=begin_s, **look)
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
    light: Any = {"alpha": 0.35, "lw": 0.8}  # the line shows what is shorter than a pixel
    axes.broken_barh(spans_s.tolist(), place, facecolor=color, edgecolor=color, **light)
    heights = np.round(shares / SHARE_STEP) * SHARE_STEP * HEIGHT
    edges = np.flatnonzero(np.diff(heights, prepend=0, append=0))
    if len(edges):
        base = i + HEIGHT / 2
        tops, times_s = base - heights[edges[:-1]], zero_s + edges * piece_s
        axes.stairs(tops, times_s, baseline=base, fill=True, color=color)
