"""Figures over time: what each rank does when, power, communication; and those of one run.

Each raises MissingDataError where the records lack what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.errors import CandleError
from candle_p1.figures import curves
from candle_p1.records.per_rank import PER_RANK_NAME
from candle_p1.records.power_file import read_traces
from candle_p1.records.power_trace import Trace
from candle_p1.reports.drawing import (
    CHARACTER_INCHES,
    COLORS,
    LOOK,
    PHASES,
    TITLE_CHARACTERS,
    Drawing,
    legend_below,
    look_of,
    new_figure,
    to_drawing,
)
from candle_p1.reports.experiments import Experiment, Series
from candle_p1.reports.figures.timeline import phase_bands, read_traced, timeline_figure
from candle_p1.reports.frame import MissingDataError, PhaseSpan, Run
from candle_p1.reports.published import published
from candle_p1.reports.words import contents, listed, number
from candle_p1.text import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IN_PARTS = "broadcast"
"""The phase of which the parts are drawn."""

MAX_ROWS = 12
WIDTH_INCHES, ROW_INCHES, BESIDE_INCHES = 7.4, 0.16, 0.75
POWER_INCHES = (8.0, 2.5)
LINES = COLORS[:4]
MAX_LINES = 2 * len(LINES)
"""The devices that can be told apart."""

DOMAINS = ("gpu", "module", "node", "cpu", "memory")
"""In the order in which devices are drawn: the paper's figure shows GPUs."""

SINCE_START = "seconds since the start of the run"


def ranks_over_time(_experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws a panel per series with a row per rank: the median run on the most ranks."""
    several = [each for each in series if each.timed[-1].num_ranks > 1]
    if not several:
        raise MissingDataError("all runs had one rank, which waits for no other")
    runs = {each.name: median_run(each.timed[-1].runs["run"]) for each in several}
    runs = {name: run for name, run in runs.items() if run.per_rank}
    if not runs:
        raise MissingDataError(f"the times of individual ranks are missing ({PER_RANK_NAME})")
    figure, plots = _rank_panels(len(runs), max(len(chosen_ranks(run)) for run in runs.values()))
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
    figure, plots = _rank_panels(1 + is_measured, num_rows)
    _draw_ranks(plots[0], run, lambda phase: f"{phase.name}, {number(phase.seconds.max())} s")
    if is_measured:
        _draw_power(plots[1], run, _traces(run))
    plots[0].set_xlim(0, run["total_s"])
    legend_below(figure, *plots)
    return figure


def _rank_panels(num: int, num_rows: int) -> tuple[Figure, list[Axes]]:
    size = (WIDTH_INCHES, BESIDE_INCHES + ROW_INCHES * num_rows)
    figure, plots = new_figure(num, 1, size, sharex=True)
    plots[-1].set_xlabel(SINCE_START)
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
    figure, plots = new_figure(len(shown), 1, POWER_INCHES, sharex=True, sharey=True)
    runs = [run for _, run, _, _ in shown]
    end_s = max(run["total_s"] or 0.0 for run in runs)
    for axes, (name, run, traces, phases) in zip(plots, shown, strict=True):
        axes.set_xlim(0, end_s)
        _shade_phases(axes, phases, end_s)
        _draw_power(axes, run, traces)
        ranks, nodes = count(run["num_ranks"], "rank"), run["num_nodes"] or 1
        title = fill(f"{name}, {ranks}, node {_node(run)} of {nodes:,}", TITLE_CHARACTERS)
        axes.set_title(title, fontsize=9, loc="left", pad=26)
    plots[-1].set_xlabel(SINCE_START)
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
        width_s = max(map(len, lines)) * CHARACTER_INCHES * end_s / (POWER_INCHES[0] - 1)
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
        look: Any = {"color": LINES[i % len(LINES)], "ls": "-" if i < len(LINES) else "--"}
        look["label"] = f"node {_node(run)}: {trace.channel.label}"
        axes.step(trace.times_s, watts, where="post", lw=1.2, **look)
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
