"""All kinds of figures, and which of them an experiment has data for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.errors import DataError, RecordError
from candle_p1.reports.drawing import LOOK, Drawing, to_drawing
from candle_p1.reports.experiments import describe
from candle_p1.reports.figures import charts, time
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.published import published_figure
from candle_p1.reports.speed import BASES, method_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

    from candle_p1.reports.experiments import Experiment, Series

MAX_SERIES = 6
"""The most series in one figure; more lines could not be told apart."""

IMPROVEMENT = "improvement"
MAX_PANELS, MAX_OVER_TIME = 4, 2
"""The panels of a figure over time, and the number of such figures of an experiment."""

WIDEST = "bars without caps are the widest intervals that few runs allow."
BARS = (
    "Lines join medians. Bars with caps are 95 % intervals; bars without caps show the range where"
    " there are too few runs for an interval. Faint dots are single runs."
)


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure.

    Attributes:
        slug: The name of the kind in file names.
        draw: Draws some series, and may return what to add to the caption; raises MissingDataError
            where the records lack the data.
        size: The most series in one figure; None draws all at once.
        most: The most such figures of an experiment; None if there is no limit.
        shows: Returns a true value for a series that has what it shows.
        missing: Why there is none where no series has; "" where that need not be said.
    """

    slug: str
    title: str
    caption: str
    draw: Callable[[Experiment, Sequence[Series]], Figure | tuple[Figure, str]]
    size: int | None = MAX_SERIES
    most: int | None = None
    shows: Callable[[Series], Any] = lambda series: series.timed
    missing: str = ""


KINDS = (
    FigureKind(
        "performance",
        "Loading, training and total time",
        f"Times of the slowest rank; training includes validation. {BARS}",
        charts.performance,
    ),
    FigureKind(
        "parts",
        "Where the time goes",
        "Medians over runs of the mean over ranks, with the total time in s above each bar."
        " Communication is the time in training in which a rank only communicated, and the transfer"
        " of the weights.",
        charts.time_shares,
    ),
    FigureKind(
        "ranks",
        "What each rank does when",
        "For each series, the run on the most ranks that has the median total time. If there are"
        " many ranks, a few evenly spaced ones are shown, along with those that load fastest and"
        " slowest. Waiting for the slowest loader and the transfer of the weights together are what"
        " the paper calls broadcast overhead.",
        time.ranks_over_time,
    ),
    FigureKind(
        IMPROVEMENT,
        "Improvement over the paper's loading",
        "(base - other) / base, in percent, against the loader original and against chunked, the"
        f" paper's method. Bars with caps are 95 % intervals; {WIDEST}",
        charts.gain,
    ),
    FigureKind(
        "scaling",
        "Scaling",
        "T(base) / T(P), where the base is the smallest number of ranks of each series. Under"
        " strong scaling, scaling efficiency is the speed-up divided by the ratio of the numbers of"
        f" ranks. Bars with caps are 95 % intervals; {WIDEST}",
        charts.scaling,
    ),
    FigureKind(
        "quality",
        "Quality against ranks",
        f"Left: training samples in the last epoch, as in the paper. Right: test samples. {BARS}",
        charts.quality,
    ),
    FigureKind(
        "epochs",
        "Quality against epochs per rank",
        f"Runs that differ only in the loader or in threads are counted together. {BARS}",
        charts.epochs_per_rank,
        size=None,
    ),
    FigureKind(
        "communication",
        "Time per epoch, communication and POP efficiency",
        "Time per epoch without validation and without the first step of the run; the share of"
        " training in which a rank only communicated; and the load balance and POP"
        f" efficiency of the whole run. {BARS}",
        charts.communication,
    ),
    FigureKind(
        "loaders",
        "Loading by file and loader",
        f"Times of the slowest rank. {BARS}",
        charts.loaders,
        size=None,
    ),
    FigureKind(
        "energy",
        "Energy and mean power",
        "Over the whole run, for the parts of the machine that have sensors: means over GPUs, and"
        f" over nodes with the devices of a node added up. {BARS}",
        charts.energy,
    ),
    FigureKind(
        "power",
        "Power over time",
        "",
        time.power_over_time,
        size=MAX_PANELS,
        most=MAX_OVER_TIME,
        shows=lambda series: time.median_runs(series, time.has_power),
        missing="no run has power readings",
    ),
    FigureKind(
        "timeline",
        "Communication over time",
        "",
        time.timeline_over_time,
        size=MAX_PANELS,
        most=MAX_OVER_TIME,
        shows=lambda series: time.median_runs(series, time.is_traced),
        missing="no run was traced (--timeline)",
    ),
)


def draw_figures(
    experiment: Experiment, prefix: str, kinds: Sequence[FigureKind] | None = None
) -> tuple[list[Drawing], list[tuple[str, str]]]:
    """Draws all figures that an experiment has data for.

    Args:
        experiment: What to draw. Traced runs have no times, but their timelines are drawn.
        prefix: The beginning of the figures' file names.
        kinds: The kinds of figures to draw; by default KINDS.

    Returns:
        The figures, and the titles of those that could not be drawn, with the reasons.
    """
    import matplotlib as mpl

    drawn: list[Drawing] = []
    missing: dict[tuple[str, str], None] = {}
    for kind in KINDS if kinds is None else kinds:
        shown = [each for each in experiment.series if kind.shows(each)]
        if not shown and kind.missing:
            missing[kind.title, kind.missing] = None
        facets = _facets(shown, kind.size or len(shown)) if shown else []
        if kind.most and len(facets) > kind.most:
            num = sum(map(len, facets[: kind.most]))
            missing[kind.title, f"only the first {num} series are shown"] = None
            del facets[kind.most :]
        for i, series in enumerate(facets, 1):
            slug, title = f"{prefix}-{kind.slug}", kind.title
            if len(facets) > 1:
                slug, title = f"{slug}-{i}", f"{title} ({i} of {len(facets)})"
            try:
                with mpl.rc_context(LOOK):
                    found = kind.draw(experiment, series)
                    figure, told = found if isinstance(found, tuple) else (found, "")
                    caption = kind.caption + told + _paper(experiment, kind.slug)
                    drawn.append(to_drawing(figure, slug, title, caption))
            except (DataError, MissingDataError, RecordError) as error:
                missing[kind.title, str(error)] = None
    return drawn, list(missing)


def _paper(experiment: Experiment, slug: str) -> str:
    """Returns what to add to a caption where the paper has such a figure or table."""
    figure = published_figure(experiment.benchmark, experiment.mode, slug)
    if not figure or slug != IMPROVEMENT:
        return f" Corresponds to the paper's {figure}." if figure else ""
    if not method_pairs(experiment):
        return ""
    return f" The improvement of chunked over original corresponds to the paper's {figure}."


def _facets(series: Sequence[Series], size: int) -> list[list[Series]]:
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
