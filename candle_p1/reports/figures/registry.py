"""All kinds of figures, and which of them an experiment has data for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.errors import DataError, RecordError
from candle_p1.reports.drawing import BARS, LOOK, Drawing, to_drawing
from candle_p1.reports.figures import bars, lines
from candle_p1.reports.figures.power import power_figure, run_to_draw
from candle_p1.reports.gains import BASES, method_pairs
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.points import describe
from candle_p1.reports.published import published_figure
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.figure import Figure

    from candle_p1.reports.points import Experiment, Series

MAX_SERIES = 6
"""The most series in one figure; more lines could not be told apart."""

MAX_POWER_FIGURES = 4
IMPROVEMENT = "improvement"
POWER_TITLE = "Power over time"
WIDEST = "bars without caps are the widest intervals that few runs allow."


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure.

    Attributes:
        slug: The name of the kind in file names.
        draw: Draws some series; raises MissingDataError.
        whole: Whether it always draws all series at once.
    """

    slug: str
    title: str
    caption: str
    draw: Callable[[Experiment, Sequence[Series]], Figure]
    whole: bool = False


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
        " strong scaling, efficiency is the speed-up divided by the ratio of the numbers of ranks."
        f" The dashed line is ideal scaling. Bars with caps are 95 % intervals; {WIDEST}",
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
        "Time per epoch, communication and efficiency",
        "Time per epoch without validation and without the first step of the run; the share of"
        " training in which a rank only communicated; and the efficiencies of the whole run as POP"
        f" defines them. {BARS}",
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
        f"Over the whole run, for the parts of the machine that have sensors. {BARS}",
        lines.energy,
    ),
)


def draw_figures(
    experiment: Experiment, prefix: str
) -> tuple[list[Drawing], list[tuple[str, str]]]:
    """Draws all figures that an experiment has data for.

    Args:
        experiment: An experiment with at least one timed run.
        prefix: The beginning of the figures' file names.

    Returns:
        The figures, and the titles of those that could not be drawn, with the reasons.
    """
    import matplotlib as mpl

    drawn: list[Drawing] = []
    missing: dict[tuple[str, str], None] = {}
    with mpl.rc_context(LOOK):
        for kind in KINDS:
            facets = [experiment.series] if kind.whole else _facets(experiment)
            for i, series in enumerate(facets):
                slug = f"{prefix}-{kind.slug}" + (f"-{i + 1}" if len(facets) > 1 else "")
                try:
                    figure = kind.draw(experiment, [each for each in series if each.timed])
                except (MissingDataError, RecordError) as error:
                    missing[kind.title, str(error)] = None
                    continue
                title = kind.title + (f" ({i + 1} of {len(facets)})" if len(facets) > 1 else "")
                caption = kind.caption + _paper(experiment, kind.slug)
                drawn.append(to_drawing(figure, slug, title, caption))
        drawn += _draw_power(experiment, prefix, missing)
    return drawn, list(missing)


def _paper(experiment: Experiment, slug: str) -> str:
    """Returns what to add to a caption where the paper has such a figure or table."""
    figure = published_figure(experiment.benchmark, experiment.mode, slug)
    if not figure or slug != IMPROVEMENT:
        return f" Corresponds to the paper's {figure}." if figure else ""
    if not method_pairs(experiment):
        return ""
    return f" The lines of chunked against original correspond to the paper's {figure}."


def _draw_power(
    experiment: Experiment, prefix: str, missing: dict[tuple[str, str], None]
) -> Iterator[Drawing]:
    """Draws power over time for one run of each of the first few series that have readings."""
    runs = [
        (i, series, run)
        for i, series in enumerate(experiment.series, 1)
        if (run := run_to_draw(series))
    ]
    if not runs:
        missing[POWER_TITLE, "no run has power readings"] = None
    if len(runs) > MAX_POWER_FIGURES:
        missing[POWER_TITLE, f"only the first {MAX_POWER_FIGURES} series are shown"] = None
    for i, series, run in runs[:MAX_POWER_FIGURES]:
        try:
            figure = power_figure(run)
        except (DataError, RecordError) as error:
            missing[POWER_TITLE, str(error)] = None
            continue
        caption = (
            f"One run on {count(run.num_ranks, 'rank')}, {series.name}: {run.energy_kind} power,"
            f" with the phases of rank 0 behind it.{_paper(experiment, 'power')}"
        )
        yield to_drawing(figure, f"{prefix}-power-{i}", POWER_TITLE, caption)


def _facets(experiment: Experiment) -> list[list[Series]]:
    """Returns the series in groups of the size of a figure; compared series stay together."""
    series = [each for each in experiment.series if each.timed]
    if len(series) <= MAX_SERIES:
        return [series]
    together: dict[str, list[Series]] = {}
    for each in series:
        others = {name: v for name, v in each.settings.items() if name not in BASES}
        together.setdefault(describe(others), []).append(each)
    facets: list[list[Series]] = [[]]
    for group in together.values():
        if facets[-1] and len(facets[-1]) + len(group) > MAX_SERIES:
            facets.append([])
        facets[-1] += group
    return facets
