"""All kinds of figures of a report, and those of lines over ranks or epochs per rank.

What draws a figure raises MissingDataError where the records lack what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from candle_p1.errors import CandleError
from candle_p1.reports import experiments as ex
from candle_p1.reports import gains, over_time
from candle_p1.reports.drawing import (
    LOOK,
    Drawing,
    Mark,
    Panel,
    line_figure,
    to_drawing,
)
from candle_p1.reports.experiments import Experiment, Quantity, Series, describe
from candle_p1.reports.frame import STRONG, MissingDataError
from candle_p1.reports.gains import EpochGroup, epoch_groups
from candle_p1.reports.published import content, published_epochs
from candle_p1.reports.statistics import contents, estimate_median
from candle_p1.text import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SERIES, MAX_PANELS = 6, 4
"""The most series in one figure: more lines could not be told apart; and in one over time."""

MAX_LINES = 7
"""With more numbers of ranks than this in a plot over epochs, their runs are counted together."""


def performance(_experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws loading, training and total time."""
    panels = _panels(series, (ex.LOAD, ex.TRAIN, ex.TOTAL))
    return line_figure([each._replace(y_label="time (s)") for each in panels], same_y=True)


def quality(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws accuracy or loss on training and test samples, with the naive predictor's."""
    name = _merit(experiment)
    panels = _panels(series, ex.qualities(name), f"the {name} is not a number in any run")
    values = ex.known(experiment.runs, ex.naive(name))
    if values:
        panels[-1] = panels[-1]._replace(reference=("y", median(values), "naive predictor"))
    return line_figure(panels, from_zero=False)


def epochs_per_rank(experiment: Experiment, _series: Sequence[Series]) -> Figure:
    """Draws quality over the epochs per rank, with the number that the paper found necessary."""
    name = _merit(experiment)
    groups = {each.title: epoch_groups(experiment, each) for each in ex.qualities(name)}
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
    needed = published_epochs(experiment)
    if needed and min(ticks) <= needed <= max(ticks):
        reference = ("x", needed, f"published: {needed}")
        panels = [panel._replace(reference=reference) for panel in panels]
    return line_figure(panels, x_label="epochs per rank", from_zero=False)


def energy(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws energy and mean power, per GPU and per node."""
    _panels(series, (ex.ENERGY,), "energy was not measured in any run")
    measured = [each for each in series if any(point.values(ex.ENERGY) for point in each.timed)]
    pairs = (each for pair in ex.POWER_AND_ENERGY for each in reversed(pair))
    shown = [ex.labelled(each, experiment.runs) for each in pairs]
    return line_figure(_panels(measured, shown), columns=2)


def gain(experiment: Experiment, series: Sequence[Series]) -> Figure:
    """Draws the improvement of time and energy over the paper's loaders, in percent."""
    compared = [
        each for each in gains.pairs(experiment) if each.base in series and each.other in series
    ]
    if not compared:
        raise MissingDataError(gains.NO_OTHER_PAIR)
    bases = list(dict.fromkeys(pair.base_settings for pair in compared))
    panels: list[Panel] = []
    for quantity in (ex.TOTAL, *(energy for _, energy in ex.comparable_energy(experiment.runs))):
        for base in bases:
            lines: dict[str, list[Mark]] = {pair.other.name: [] for pair in compared}
            for pair in compared:
                if pair.base_settings == base:
                    lines[pair.other.name] += [
                        Mark(each.num_ranks, each.percent)
                        for each in gains.improvements(*pair, quantity)
                        if each.num_ranks
                    ]
            if any(lines.values()):
                title = f"{quantity.title}\nagainst {base}" if len(bases) > 1 else quantity.title
                panels.append(Panel(title, lines, "improvement (%)", reference=("y", 0, "")))
    if not panels:
        raise MissingDataError("the series to compare have no runs on the same number of ranks")
    return line_figure(panels, columns=len(bases) if len(bases) > 1 else None, same_y=True)


def _merit(experiment: Experiment) -> str:
    name = ex.merit(experiment.runs)
    if name is None:
        raise MissingDataError(ex.NOT_EVALUATED)
    return name


def _panels(
    series: Sequence[Series], quantities: Iterable[Quantity], missing: str = "no run has times"
) -> list[Panel]:
    panels = []
    for quantity in quantities:
        lines = {
            each.name: [
                Mark(point.num_ranks, estimate, point.values(quantity))
                for point in each.timed
                if (estimate := point.estimate(quantity))
            ]
            for each in series
        }
        if any(lines.values()):
            panels.append(Panel(quantity.title, lines, quantity.unit))
    if not panels:
        raise MissingDataError(missing)
    return panels


def _epoch_lines(groups: Sequence[EpochGroup], *, together: bool) -> dict[str, list[Mark]]:
    """Returns lines by label: one per group, or with `together` False per number of ranks."""
    lines: dict[str, list[Mark]] = {}
    for group in groups:
        for epochs, by_ranks in group.by_epochs.items():
            values_of = {count(num, "rank"): by_ranks[num] for num in sorted(by_ranks)}
            if together:
                values_of = {"": group.values(epochs)}
            for ranks, values in values_of.items():
                label = ", ".join(filter(None, (group.name, ranks))) or "all runs"
                lines.setdefault(label, []).append(Mark(epochs, estimate_median(values), values))
    return lines


DRAW: dict[str, Callable[[Experiment, Sequence[Series]], Figure | tuple[Figure, str]]] = {
    "performance": performance,
    "ranks": over_time.ranks_over_time,
    "improvement": gain,
    "quality": quality,
    "epochs": epochs_per_rank,
    "energy": energy,
    "power": over_time.power_over_time,
    "timeline": over_time.timeline_over_time,
}
"""What draws some series as a kind of figure; those over time return their captions, too."""

OVER_TIME = {"power": over_time.has_power, "timeline": over_time.is_traced}
"""Which of the runs figures over time can show; others show runs with times."""


def draw_figures(
    experiment: Experiment, slugs: Collection[str] = tuple(DRAW)
) -> tuple[list[Drawing], list[tuple[str, str]]]:
    """Draws the figures that an experiment has data for, of all kinds or some.

    Traced runs have no times, but their timelines are drawn.

    Returns:
        The figures; and the titles of those that could not be drawn, with the reasons.
    """
    import matplotlib as mpl

    drawn: list[Drawing] = []
    missing: dict[tuple[str, str], None] = {}
    for slug, kind in contents()["figures"].items():
        if slug not in slugs:
            continue
        has = OVER_TIME.get(slug)
        series = [each for each in experiment.series if has or each.timed]
        if has:
            series = [each for each in series if over_time.median_runs(each, has)]
            if not series:
                missing[kind["title"], kind["missing"]] = None
        size = MAX_PANELS if has else MAX_SERIES
        facets = [series] if series and kind.get("whole") else _facets(series, size)
        for i, shown in enumerate(facets, 1):
            name, title = f"{experiment.slug}-{slug}", kind["title"]
            if len(facets) > 1:
                name, title = f"{name}-{i}", f"{title} ({i} of {len(facets)})"
            try:
                with mpl.rc_context(LOOK):
                    found = DRAW[slug](experiment, shown)
                    if isinstance(found, tuple):
                        figure, caption = found
                    else:
                        figure, caption = found, kind["caption"].format(**contents()["bars"])
                    caption += _paper(experiment, slug)
                    drawn.append(to_drawing(figure, name, title, caption))
            except CandleError as error:
                missing[kind["title"], str(error)] = None
    return drawn, list(missing)


def _paper(experiment: Experiment, slug: str) -> str:
    """Returns what to add to a caption where the paper has such a figure or table."""
    figures = content()["figures"].get(f"{experiment.benchmark}-{experiment.mode}", {})
    figure = figures.get(slug)
    if figure and slug == "improvement":
        found = f" The improvement of chunked over original corresponds to the paper's {figure}."
        return found if gains.pairs(experiment, {True}) else ""
    return f" Corresponds to the paper's {figure}." if figure else ""


def _facets(series: Sequence[Series], size: int) -> list[list[Series]]:
    """Returns series in groups of the size of a figure; compared series stay together."""
    together: dict[str, list[Series]] = {}
    for each in series:
        others = {name: v for name, v in each.settings.items() if name not in gains.BASES}
        together.setdefault(describe(others) if len(series) > size else "", []).append(each)
    facets: list[list[Series]] = []
    for group in together.values():
        if facets and len(facets[-1]) + len(group) <= size:
            facets[-1] += group
        else:
            facets.append(group)
    return facets
