"""All kinds of figures, and which of them an experiment has data for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from candle_p1.errors import DataError, RecordError
from candle_p1.reports.drawing import BARS, LOOK, Drawing, to_drawing
from candle_p1.reports.figures import bars, lines, model
from candle_p1.reports.figures.power import power_caption, power_figure, read_measured
from candle_p1.reports.figures.timeline import read_traced, timeline_caption, timeline_figure
from candle_p1.reports.gains import BASES, method_pairs
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.points import describe
from candle_p1.reports.published import published, published_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.figure import Figure

    from candle_p1.reports.modelled import ModelOptions
    from candle_p1.reports.points import Experiment, Series
    from candle_p1.reports.runs import RecordedRun

MAX_SERIES = 6
"""The most series in one figure; more lines could not be told apart."""

IMPROVEMENT = "improvement"
MAX_PANELS, MAX_OVER_TIME = 4, 2
"""The panels of a figure over time, and the number of such figures of an experiment."""

WIDEST = "bars without caps are the widest intervals that few runs allow."


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure.

    Attributes:
        slug: The name of the kind in file names.
        draw: Draws some series; raises MissingDataError.
        whole: Whether it always draws all series at once.
        told: Returns what to add to the caption; raises MissingDataError as `draw` does.
    """

    slug: str
    title: str
    caption: str
    draw: Callable[[Experiment, Sequence[Series]], Figure]
    whole: bool = False
    told: Callable[[Experiment, Sequence[Series]], str] | None = None


@dataclass(frozen=True)
class OverTimeKind:
    """A kind of figure that shows one run of each series, one above the other.

    Attributes:
        slug: The name of the kind in file names.
        lacking: Why there is no such figure where no run has what it shows.
        has: Returns a true value for a run that has it.
        read: Reads it, given the name of the series; raises DataError, MissingDataError or
            RecordError.
        draw: Draws what was read.
        caption: Returns the caption.
        published: The quantities of which the paper's values belong to it.
    """

    slug: str
    title: str
    lacking: str
    has: Callable[[RecordedRun], Any]
    read: Callable[[str, RecordedRun], Any]
    draw: Callable[[Sequence[Any]], Figure]
    caption: Callable[[Sequence[Any]], str]
    published: Sequence[str] = ()


OVER_TIME = (
    OverTimeKind(
        "power",
        "Power over time",
        "no run has power readings",
        lambda run: run.power_files,
        read_measured,
        power_figure,
        power_caption,
    ),
    OverTimeKind(
        "timeline",
        "Communication over time",
        "no run was traced (--timeline)",
        lambda run: run.record.timeline,
        read_traced,
        timeline_figure,
        timeline_caption,
        ("broadcast_overhead_s",),
    ),
)


def model_kinds(options: ModelOptions | None = None) -> tuple[FigureKind, ...]:
    """Returns the kinds of figures of models.

    Args:
        options: How the models are made.
    """
    told = partial(model.told, options=options)
    return (
        FigureKind(
            "model",
            "Model: total time against ranks",
            "The model's curve and band through the measured runs, and beyond them to four times as"
            " many ranks. Numbers of ranks that cannot share the epochs are left out.",
            partial(model.curve, options=options),
            told=told,
        ),
        FigureKind(
            "model-shares",
            "Model: where the time goes",
            "The share of each phase in the predicted time. To the right of the dotted line nothing"
            " was measured.",
            partial(model.shares, options=options),
            told=told,
        ),
    )


KINDS = (
    FigureKind(
        "performance",
        "Loading, training and total time",
        f"Times of the slowest rank; training includes validation. {BARS}",
        lines.performance,
    ),
    FigureKind(
        "parts",
        "Where the time goes",
        "Medians over runs of the mean over ranks, with the total time in s above each bar."
        " Communication is the time in training in which a rank only communicated, and the transfer"
        " of the weights.",
        bars.time_parts,
    ),
    FigureKind(
        "ranks",
        "What each rank does when",
        "For each series, the run on the most ranks that has the median total time. If there are"
        " many ranks, a few evenly spaced ones are shown, along with those that load fastest and"
        " slowest. Waiting for the slowest loader and the transfer of the weights together are what"
        " the paper calls broadcast overhead.",
        bars.ranks_over_time,
    ),
    FigureKind(
        IMPROVEMENT,
        "Improvement over the paper's loading",
        "(base - other) / base, in percent, against the loader original and against chunked, the"
        f" paper's method. Bars with caps are 95 % intervals; {WIDEST}",
        lines.gain,
    ),
    FigureKind(
        "scaling",
        "Scaling",
        "T(base) / T(P), where the base is the smallest number of ranks of each series. Under"
        " strong scaling, scaling efficiency is the speed-up divided by the ratio of the numbers of"
        f" ranks. Bars with caps are 95 % intervals; {WIDEST}",
        lines.scaling,
    ),
    FigureKind(
        "quality",
        "Quality against ranks",
        f"Left: training samples in the last epoch, as in the paper. Right: test samples. {BARS}",
        lines.quality,
    ),
    FigureKind(
        "epochs",
        "Quality against epochs per rank",
        f"Runs that differ only in the loader or in threads are counted together. {BARS}",
        lines.epochs_per_rank,
        whole=True,
    ),
    FigureKind(
        "communication",
        "Time per epoch, communication and POP efficiency",
        "Time per epoch without validation and without the first step of the run; the share of"
        " training in which a rank only communicated; and the load balance and POP"
        f" efficiency of the whole run. {BARS}",
        lines.communication,
    ),
    FigureKind(
        "loaders",
        "Loading by file and loader",
        f"Times of the slowest rank. {BARS}",
        lines.loaders,
        whole=True,
    ),
    FigureKind(
        "energy",
        "Energy and mean power",
        "Over the whole run, for the parts of the machine that have sensors: means over GPUs, and"
        f" over nodes with the devices of a node added up. {BARS}",
        lines.energy,
    ),
    *model_kinds(),
)


def draw_figures(
    experiment: Experiment,
    prefix: str,
    kinds: Sequence[FigureKind] | None = None,
    over_time: Sequence[OverTimeKind] | None = None,
) -> tuple[list[Drawing], list[tuple[str, str]]]:
    """Draws all figures that an experiment has data for.

    Args:
        experiment: What to draw. Traced runs have no times, but their timelines are drawn.
        prefix: The beginning of the figures' file names.
        kinds: The kinds of figures to draw; by default KINDS.
        over_time: The kinds of figures over time to draw; by default OVER_TIME.

    Returns:
        The figures, and the titles of those that could not be drawn, with the reasons.
    """
    import matplotlib as mpl

    drawn: list[Drawing] = []
    missing: dict[tuple[str, str], None] = {}
    with mpl.rc_context(LOOK):
        timed = [each for each in experiment.series if each.timed]
        for kind in (KINDS if kinds is None else kinds) if timed else ():
            facets = [timed] if kind.whole else _facets(timed)
            for i, series in enumerate(facets):
                slug = f"{prefix}-{kind.slug}" + (f"-{i + 1}" if len(facets) > 1 else "")
                try:
                    figure = kind.draw(experiment, series)
                    told = f" {kind.told(experiment, series)}" if kind.told else ""
                except (MissingDataError, RecordError) as error:
                    missing[kind.title, str(error)] = None
                    continue
                title = kind.title + (f" ({i + 1} of {len(facets)})" if len(facets) > 1 else "")
                caption = kind.caption + told + _paper(experiment, kind.slug)
                drawn.append(to_drawing(figure, slug, title, caption))
        for each in OVER_TIME if over_time is None else over_time:
            drawn += _draw_over_time(each, experiment, prefix, missing)
    return drawn, list(missing)


def _paper(experiment: Experiment, slug: str) -> str:
    """Returns what to add to a caption where the paper has such a figure or table."""
    figure = published_figure(experiment.benchmark, experiment.mode, slug)
    if not figure or slug != IMPROVEMENT:
        return f" Corresponds to the paper's {figure}." if figure else ""
    if not method_pairs(experiment):
        return ""
    return f" The improvement of chunked over original corresponds to the paper's {figure}."


def _draw_over_time(
    kind: OverTimeKind, experiment: Experiment, prefix: str, missing: dict[tuple[str, str], None]
) -> Iterator[Drawing]:
    """Draws one run of each of the first few series that have what such a figure shows."""
    runs = {each: found for each in experiment.series if (found := _by_ranks(each, kind.has))}
    if not runs:
        missing[kind.title, kind.lacking] = None
        return
    facets = _facets(list(runs), MAX_PANELS)
    if len(facets) > MAX_OVER_TIME:
        num = sum(map(len, facets[:MAX_OVER_TIME]))
        missing[kind.title, f"only the first {num} series are shown"] = None
        del facets[MAX_OVER_TIME:]
    for i, series in enumerate(facets, 1):
        common = set.intersection(*(set(runs[each]) for each in series))
        panels = []
        for each in series:
            run = runs[each][max(common or runs[each])]
            try:
                panels.append(kind.read(each.name, run))
            except (DataError, MissingDataError, RecordError) as error:
                missing[kind.title, str(error)] = None
        if panels:
            slug = f"{prefix}-{kind.slug}" + (f"-{i}" if len(facets) > 1 else "")
            title = kind.title + (f" ({i} of {len(facets)})" if len(facets) > 1 else "")
            loaders = {each.run.loader for each in panels}
            told = published(experiment, *kind.published, loaders=loaders)
            caption = kind.caption(panels) + _paper(experiment, kind.slug)
            caption += "".join(f" {str(each)[0].upper()}{str(each)[1:]}." for each in told)
            yield to_drawing(kind.draw(panels), slug, title, caption)


def _by_ranks(series: Series, has: Callable[[RecordedRun], Any]) -> dict[int, RecordedRun]:
    """Returns by number of ranks the run with the median time of those that have something."""
    found = {}
    for point in series.points:
        runs = [run for run in point.all_runs if run.status == "ok" and has(run)]
        if runs:
            in_order = sorted(runs, key=lambda run: run.total_s or 0.0)
            found[point.num_ranks] = in_order[len(runs) // 2]
    return found


def _facets(series: Sequence[Series], size: int = MAX_SERIES) -> list[list[Series]]:
    """Returns series in groups of the size of a figure; compared series stay together."""
    if len(series) <= size:
        return [list(series)]
    together: dict[str, list[Series]] = {}
    for each in series:
        others = {name: v for name, v in each.settings.items() if name not in BASES}
        together.setdefault(describe(others), []).append(each)
    facets: list[list[Series]] = [[]]
    for group in together.values():
        if facets[-1] and len(facets[-1]) + len(group) > size:
            facets.append([])
        facets[-1] += group
    return facets
