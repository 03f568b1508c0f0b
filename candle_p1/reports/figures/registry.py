"""All kinds of figures, and which of them an experiment has data for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from candle_p1.errors import DataError, RecordError
from candle_p1.reports.drawing import LOOK, Drawing, to_drawing
from candle_p1.reports.experiments import Experiment, Series, describe
from candle_p1.reports.figures import charts, time
from candle_p1.reports.frame import MissingDataError, Run
from candle_p1.reports.published import published_figure
from candle_p1.reports.speed import BASES, method_pairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SERIES, MAX_PANELS = 6, 4
"""The most series in one figure: more lines could not be told apart; and in one over time."""

WIDEST = "bars without caps are the widest intervals that few runs allow."
BARS = (
    "Lines join medians. Bars with caps are 95 % intervals; bars without caps show the range where"
    " there are too few runs for an interval. Faint dots are single runs."
)


class FigureKind(NamedTuple):
    """A kind of figure.

    Attributes:
        slug: The name of the kind in file names.
        draw: Draws some series, and may return what to add to the caption; raises MissingDataError
            where the records lack the data.
        whole: Whether it always draws all series at once.
        has: Of a figure over time, which of the runs it can show; others show runs with times.
        missing: Why there is no figure over time where no run can be shown.
    """

    slug: str
    title: str
    draw: Callable[[Experiment, Sequence[Series]], Figure | tuple[Figure, str]]
    caption: str = ""
    whole: bool = False
    has: Callable[[Run], bool] | None = None
    missing: str = ""


PERFORMANCE = f"Times of the slowest rank; training includes validation. {BARS}"
SHARES = (
    "Medians over runs of the mean over ranks, with the total time in s above each bar."
    " Communication is the time in training in which a rank only communicated, and the transfer of"
    " the weights."
)
RANKS = (
    "For each series, the run on the most ranks that has the median total time. If there are many"
    " ranks, a few evenly spaced ones are shown, along with those that load fastest and slowest."
    " Waiting for the slowest loader and the transfer of the weights together are what the paper"
    " calls broadcast overhead."
)
GAIN = (
    "(base - other) / base, in percent, against the loader original and against chunked, the"
    f" paper's method. Bars with caps are 95 % intervals; {WIDEST}"
)
SCALING = (
    "T(base) / T(P), where the base is the smallest number of ranks of each series. Under strong"
    " scaling, scaling efficiency is the speed-up divided by the ratio of the numbers of ranks."
    f" Bars with caps are 95 % intervals; {WIDEST}"
)
QUALITY = f"Left: training samples in the last epoch, as in the paper. Right: test samples. {BARS}"
EPOCHS = f"Runs that differ only in the loader or in threads are counted together. {BARS}"
COMMUNICATION = (
    "Time per epoch without validation and without the first step of the run; the share of training"
    " in which a rank only communicated; and the load balance and POP efficiency of the whole run."
    f" {BARS}"
)
LOADERS = f"Times of the slowest rank. {BARS}"
ENERGY = (
    "Over the whole run, for the parts of the machine that have sensors: means over GPUs, and over"
    f" nodes with the devices of a node added up. {BARS}"
)
COMMUNICATED = "Time per epoch, communication and POP efficiency"
NO_POWER, NOT_TRACED = "no run has power readings", "no run was traced (--timeline)"

KINDS = (
    FigureKind("performance", "Loading, training and total time", charts.performance, PERFORMANCE),
    FigureKind("parts", "Where the time goes", charts.time_shares, SHARES),
    FigureKind("ranks", "What each rank does when", time.ranks_over_time, RANKS),
    FigureKind("improvement", "Improvement over the paper's loading", charts.gain, GAIN),
    FigureKind("scaling", "Scaling", charts.scaling, SCALING),
    FigureKind("quality", "Quality against ranks", charts.quality, QUALITY),
    FigureKind("epochs", "Quality against epochs per rank", charts.epochs_per_rank, EPOCHS, True),
    FigureKind("communication", COMMUNICATED, charts.communication, COMMUNICATION),
    FigureKind("loaders", "Loading by file and loader", charts.loaders, LOADERS, True),
    FigureKind("energy", "Energy and mean power", charts.energy, ENERGY),
    FigureKind(
        "power", "Power over time", time.power_over_time, has=time.has_power, missing=NO_POWER
    ),
    FigureKind(
        "timeline",
        "Communication over time",
        time.timeline_over_time,
        has=time.is_traced,
        missing=NOT_TRACED,
    ),
)


def draw_figures(
    experiment: Experiment, prefix: str, kinds: Sequence[FigureKind] | None = None
) -> tuple[list[Drawing], list[tuple[str, str]]]:
    """Draws all figures that an experiment has data for, of all KINDS or some.

    Traced runs have no times, but their timelines are drawn.

    Returns:
        The figures, whose file names begin with `prefix`; and the titles of those that could not be
        drawn, with the reasons.
    """
    import matplotlib as mpl

    drawn: list[Drawing] = []
    missing: dict[tuple[str, str], None] = {}
    for kind in KINDS if kinds is None else kinds:
        has, size = kind.has, MAX_PANELS if kind.has else MAX_SERIES
        series = [each for each in experiment.series if has or each.timed]
        if has:
            series = [each for each in series if time.median_runs(each, has)]
        if not series and kind.missing:
            missing[kind.title, kind.missing] = None
        facets = [series] if series and kind.whole else _facets(series, size)
        for i, shown in enumerate(facets, 1):
            slug, title = f"{prefix}-{kind.slug}", kind.title
            if len(facets) > 1:
                slug, title = f"{slug}-{i}", f"{title} ({i} of {len(facets)})"
            try:
                with mpl.rc_context(LOOK):
                    found = kind.draw(experiment, shown)
                    figure, told = found if isinstance(found, tuple) else (found, "")
                    caption = kind.caption + told + _paper(experiment, kind.slug)
                    drawn.append(to_drawing(figure, slug, title, caption))
            except (DataError, MissingDataError, RecordError) as error:
                missing[kind.title, str(error)] = None
    return drawn, list(missing)


def _paper(experiment: Experiment, slug: str) -> str:
    """Returns what to add to a caption where the paper has such a figure or table."""
    figure = published_figure(experiment.benchmark, experiment.mode, slug)
    if figure and slug == "improvement":
        found = f" The improvement of chunked over original corresponds to the paper's {figure}."
        return found if method_pairs(experiment) else ""
    return f" Corresponds to the paper's {figure}." if figure else ""


def _facets(series: Sequence[Series], size: int) -> list[list[Series]]:
    """Returns series in groups of the size of a figure; compared series stay together."""
    together: dict[str, list[Series]] = {}
    for each in series:
        others = {name: v for name, v in each.settings.items() if name not in BASES}
        together.setdefault(describe(others) if len(series) > size else "", []).append(each)
    facets: list[list[Series]] = []
    for group in together.values():
        if facets and len(facets[-1]) + len(group) <= size:
            facets[-1] += group
        else:
            facets.append(group)
    return facets
