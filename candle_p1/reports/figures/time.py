"""Figures of where the time goes, what each rank does when, and those of one run."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.errors import CandleError, RecordError
from candle_p1.figures import BLUE, GREEN, PURPLE, VERMILION, curves
from candle_p1.records.per_rank import PER_RANK_NAME
from candle_p1.reports.columns import TOTAL, time_parts
from candle_p1.reports.drawing import (
    COLORS,
    LOOK,
    Drawing,
    draw_bars,
    legend_below,
    new_figure,
    to_drawing,
)
from candle_p1.reports.figures.over_time import (
    SINCE_START,
    draw_power,
    is_traced,
    median_run,
    read_measured,
)
from candle_p1.reports.figures.timeline import read_traced, timeline_figure
from candle_p1.reports.frame import (
    COMMUNICATING,
    LOADING,
    OTHER,
    STARTUP,
    TRAINING,
    UNDIVIDED,
    WAITING,
)
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.words import number
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from candle_p1.reports.experiments import Experiment, Point, Series
    from candle_p1.reports.frame import PhaseSpan, Run

ORANGE, SKY = COLORS[4:6]
PHASE_LOOKS = {
    "startup": ("#BBBBBB", ""),
    "load": (VERMILION, "//"),
    "digest": ("#F0E442", ""),
    "preprocess": (GREEN, ""),
    "build": (SKY, ""),
    "wait": (ORANGE, ".."),
    "transfer": (PURPLE, "\\\\"),
    "train": (BLUE, ""),
    "evaluate": ("#332288", "xx"),
    "report": ("#777777", ""),
}
"""The colour and hatch of each phase, and of the parts of the broadcast."""

PART_LOOKS = {
    STARTUP: PHASE_LOOKS["startup"],
    LOADING: PHASE_LOOKS["load"],
    WAITING: PHASE_LOOKS["wait"],
    TRAINING: PHASE_LOOKS["train"],
    COMMUNICATING: PHASE_LOOKS["transfer"],
    UNDIVIDED: (SKY, "xx"),
    OTHER: PHASE_LOOKS["report"],
}
PHASE_TITLES = {
    "startup": STARTUP,
    "load": LOADING,
    "wait": WAITING,
    "transfer": "transfer of the weights",
    "train": "training, including communication",
}
IN_PARTS = "broadcast"
"""The phase of which the parts are drawn."""

MAX_COLUMNS = 3
TITLE_WIDTH = 44
MAX_BARS = 4
"""With more bars side by side there is no room for percentages."""

MIN_BARS = 3
"""With fewer, bars are as narrow as with so many."""

LABEL_PERCENT = 10
"""A smaller part has no room for its percentage."""

MAX_ROWS = 12
WIDTH_INCHES, ROW_INCHES, BESIDE_INCHES = 7.4, 0.16, 0.75


def time_shares(_experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws a panel per series, with a bar per number of ranks and its total time above."""
    columns = 2 if len(series) in (2, 4) else MAX_COLUMNS
    figure, plots = new_figure(len(series), columns, sharey=True)
    counts = sorted({point.num_ranks for each in series for point in each.timed})
    has_room = len(counts) <= MAX_BARS
    looks = {part: _look(*PART_LOOKS[part]) for part in PART_LOOKS}
    for axes, each in zip(plots, series, strict=True):
        points = [each.at(num) for num in counts]
        totals = [point.estimate(TOTAL) if point else None for point in points]
        above = [number(total.value) + " s" * has_room if total else "" for total in totals]
        shares = [_shares(point) if point else {} for point in points]
        draw_bars(axes, shares, looks, above, LABEL_PERCENT if has_room else None)
        axes.set_xticks(range(len(counts)), [f"{num:,}" for num in counts])
        beside = 0.5 + max(0, MIN_BARS - len(counts)) / 2
        axes.set_xlim(-beside, len(counts) - 1 + beside)
        axes.set_xlabel("ranks")
        axes.set_title(fill(each.name, TITLE_WIDTH), fontsize=9)
    for axes in plots[::columns]:
        axes.set_ylabel("share of the total time (%)")
    legend_below(figure, *plots)
    return figure


def _shares(point: Point) -> dict[str, float]:
    """Returns the medians of the parts over the runs that know them, scaled to a sum of 100."""
    medians = time_parts(point.runs).median()
    return {str(part): 100 * value / medians.sum() for part, value in medians.items() if value > 0}


def ranks_over_time(_experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws a panel per series with a row per rank: the median run on the most ranks.

    Raises:
        MissingDataError: All runs had one rank, or the times of individual ranks are missing.
    """
    several = [each for each in series if each.timed[-1].num_ranks > 1]
    if not several:
        raise MissingDataError("all runs had one rank, which waits for no other")
    runs = {each.name: median_run(each.timed[-1].runs["run"]) for each in several}
    runs = {name: run for name, run in runs.items() if run.per_rank}
    if not runs:
        raise MissingDataError(f"the times of individual ranks are missing ({PER_RANK_NAME})")
    num_rows = max(len(chosen_ranks(run)) for run in runs.values())
    size = (WIDTH_INCHES, BESIDE_INCHES + ROW_INCHES * num_rows)
    figure, plots = new_figure(len(runs), 1, size, sharex=True)
    for axes, (name, run) in zip(plots, runs.items(), strict=True):
        _draw_ranks(axes, run, lambda phase: PHASE_TITLES.get(phase.name, phase.name))
        axes.set_title(f"{name}, {count(run['num_ranks'], 'rank')}", fontsize=9)
    plots[-1].set_xlabel(SINCE_START)
    legend_below(figure, *plots)
    return figure


def phases_figure(run: Run) -> Figure:
    """Draws the phases of each rank over time, above the power of a node where it was measured.

    Of many ranks, a few are drawn; see `chosen_ranks`.

    Raises:
        MissingDataError: The record has no phases, or the values of the ranks are missing.
        CandleError: The values of the ranks, or the readings of power, cannot be read.
    """
    if not any(run.phase_spans()):
        raise MissingDataError("the times of the ranks are not beside the record")
    has_power = run["energy_kind"] != "absent" and bool(run.power_files)
    num_rows = max(len(chosen_ranks(run)), 10 if has_power else 4)
    size = (WIDTH_INCHES, BESIDE_INCHES + ROW_INCHES * num_rows)
    figure, plots = new_figure(1 + has_power, 1, size, sharex=True)
    _draw_ranks(plots[0], run, lambda phase: f"{phase.name}, {number(phase.seconds.max())} s")
    if has_power:
        draw_power(plots[1], read_measured("", run))
    plots[-1].set(xlabel=SINCE_START, xlim=(0, run["total_s"]))
    legend_below(figure, *plots)
    return figure


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
    whole = {IN_PARTS} if any(each.within for each in phases) else set()
    others = iter(COLORS * len(phases))
    for each in phases:
        begin_s = each.begin_s[ranks]
        rows = np.flatnonzero(~np.isnan(begin_s))
        if each.name not in whole and len(rows):
            look = _look(*(PHASE_LOOKS.get(each.name) or (next(others), "oo")))
            bars: Any = {"height": 0.9, "label": title_of(each)} | look
            axes.barh(rows, each.seconds[ranks][rows], left=begin_s[rows], **bars)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks], fontsize=7)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_ylabel("rank")
    axes.grid(visible=False)


def _look(color: str, hatch: str) -> dict[str, Any]:
    return {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}


def run_drawings(run: Run) -> Iterator[Drawing | str]:
    """Yields the figures of a run, or for one that cannot be drawn the reason."""
    figures: list[tuple[str, str, Callable[[Run], Figure]]] = [
        ("phases", "Phases", phases_figure),
        ("curves", "Training", _curves),
    ]
    if is_traced(run):
        figures.append(
            (
                "timeline",
                "Communication over time",
                lambda run: timeline_figure([read_traced(run.record.benchmark, run)]),
            )
        )
    for slug, title, draw in figures:
        try:
            yield _drawn(run, slug, title, draw)
        except (CandleError, MissingDataError) as error:
            yield f"{title}: {error}"


def phases_svg(run: Run) -> str:
    """Returns the picture of the phases and the power, as SVG in which text remains text.

    Raises:
        CandleError: It cannot be drawn.
    """
    try:
        return _drawn(run, "phases", "", phases_figure).svg
    except MissingDataError as error:
        raise RecordError(f"{run.place}: no picture: {error}") from error


def _drawn(run: Run, slug: str, title: str, draw: Callable[[Run], Figure]) -> Drawing:
    import matplotlib as mpl

    with mpl.rc_context(LOOK):
        return to_drawing(draw(run), slug, title, "")


def _curves(run: Run) -> Figure:
    if not run.history:
        raise MissingDataError("no epoch was recorded")
    return curves(run.history, title="")
