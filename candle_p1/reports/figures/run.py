"""The figures of one run: what each rank does when, power over the same time, and the curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.errors import CandleError, RecordError
from candle_p1.figures import BLUE, GREEN, PURPLE, VERMILION, curves
from candle_p1.reports.drawing import COLORS, LOOK, legend_below, new_figure, to_drawing
from candle_p1.reports.figures.bars import (
    BESIDE_INCHES,
    IN_PARTS,
    ROW_INCHES,
    WIDTH_INCHES,
    chosen,
    draw_ranks,
)
from candle_p1.reports.figures.power import draw_power, read_measured
from candle_p1.reports.figures.timeline import read_traced, timeline_figure
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.words import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from matplotlib.figure import Figure

    from candle_p1.reports.drawing import Drawing
    from candle_p1.reports.runs import RecordedRun

_ORANGE, _SKY, _BLACK = COLORS[4:7]
_COLORS = {
    "startup": ("#BBBBBB", ""),
    "load": (VERMILION, "//"),
    "digest": ("#F0E442", ""),
    "preprocess": (GREEN, ""),
    "build": (_SKY, ""),
    "wait": (_ORANGE, ".."),
    "transfer": (PURPLE, "\\\\"),
    "train": (BLUE, ""),
    "evaluate": ("#332288", "xx"),
    "report": ("#777777", ""),
}
"""The colour and hatch of each phase, and of the parts of the broadcast."""

POWER_INCHES = 2.2


def run_drawings(run: RecordedRun) -> Iterator[Drawing | str]:
    """Yields the figures of a run, or for one that cannot be drawn the reason."""
    import matplotlib as mpl

    figures = [("phases", "Phases", phases_figure), ("curves", "Training", _curves)]
    if run.record.timeline:
        figures.append(("timeline", "Communication over time", _timeline))
    for slug, title, draw in figures:
        with mpl.rc_context(LOOK):
            try:
                yield to_drawing(draw(run), slug, title, "")
            except (CandleError, MissingDataError) as error:
                yield f"{title}: {error}"


def phases_svg(run: RecordedRun) -> str:
    """Returns the picture of the phases and the power, as SVG in which text remains text.

    Raises:
        CandleError: It cannot be drawn.
    """
    import matplotlib as mpl

    with mpl.rc_context(LOOK):
        try:
            return to_drawing(phases_figure(run), "phases", "", "").svg
        except MissingDataError as error:
            raise RecordError(f"{run.place}: no picture: {error}") from error


def phases_figure(run: RecordedRun) -> Figure:
    """Draws the phases of each rank over time, above the power of a node where it was measured.

    Of many ranks, a few are drawn; see `chosen`.

    Raises:
        MissingDataError: The record has no phases, or the values of the ranks are missing.
        CandleError: The values of the ranks, or the readings of power, cannot be read.
    """
    looks = _looks(run)
    if not looks:
        raise MissingDataError("the times of the ranks are not beside the record")
    shown = chosen(run)
    has_power = run.energy_kind != "absent" and bool(run.power_files)
    size = (WIDTH_INCHES, BESIDE_INCHES + ROW_INCHES * max(len(shown), 4))
    figure, plots = new_figure(1 + has_power, 1, size, sharex=True)
    draw_ranks(plots[0], run, shown, looks)
    if has_power:
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + POWER_INCHES)
        draw_power(plots[1], read_measured("", run))
    plots[-1].set(xlabel="seconds since the start of the run", xlim=(0, run.total_s))
    for label, look in looks.values():
        plots[0].barh(0, 0, label=label, **look)
    legend_below(figure, *plots)
    return figure


def _looks(run: RecordedRun) -> Mapping[str, tuple[str, Any]]:
    """Returns the label and look of each phase and part that is drawn, in order."""
    looks: dict[str, tuple[str, Any]] = {}
    stretches = [each for each in run.stretches() if each.within in ("", IN_PARTS)]
    whole = {IN_PARTS} if any(each.within for each in stretches) else set()
    others = iter(COLORS * len(stretches))
    for each in stretches:
        if each.name not in whole:
            color, hatch = _COLORS.get(each.name) or (next(others), "oo")
            look = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
            looks[each.name] = (f"{each.name}, {number(each.seconds.max())} s", look)
    return looks


def _timeline(run: RecordedRun) -> Figure:
    """Draws the communication of a traced run over time.

    Raises:
        MissingDataError: Its timeline is missing, damaged or empty.
        RecordError: The record does not say when the run started.
    """
    return timeline_figure([read_traced(run.benchmark, run)])


def _curves(run: RecordedRun) -> Figure:
    """Draws loss and metrics over the epochs.

    Raises:
        MissingDataError: No epoch was recorded.
    """
    history = run.history
    if not history:
        raise MissingDataError("no epoch was recorded")
    return curves(history, title="")
