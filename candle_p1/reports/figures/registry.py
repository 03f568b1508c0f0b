"""All kinds of figures, and what of an experiment they can draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from candle_p1.errors import DataError
from candle_p1.reports.drawing import BARS, Drawing, style, to_png, to_svg
from candle_p1.reports.figures.epochs import epochs_per_worker
from candle_p1.reports.figures.lines import energy, exchange, gain, performance, quality, scaling
from candle_p1.reports.figures.loaders import loaders
from candle_p1.reports.figures.parts import time_parts
from candle_p1.reports.figures.power import power_over_time, run_to_draw
from candle_p1.reports.figures.ranks import ranks_over_time
from candle_p1.reports.improvements import ORIGINAL
from candle_p1.reports.missing import Missing, MissingDataError
from candle_p1.reports.points import STRONG, describe
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.figure import Figure

    from candle_p1.reports.points import Experiment, Series

MAX_SERIES = 6
"""Of one figure; with more, lines are no longer told apart."""

MAX_POWER_FIGURES = 4


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure.

    Attributes:
        slug: In file names.
        title: What it shows.
        caption: How to read it.
        draw: Draws some series; raises MissingDataError.
        paper: By (benchmark, mode), what it corresponds to in the paper.
        whole: Whether it always draws all series at once.
    """

    slug: str
    title: str
    caption: str
    draw: Callable[[Experiment, Sequence[Series]], Figure]
    paper: Mapping[tuple[str, str], str] = field(default_factory=dict)
    whole: bool = False


KINDS = (
    FigureKind(
        "performance",
        "Loading, training and total time",
        "Seconds of the slowest rank; training with its validation. " + BARS,
        performance,
        {
            ("nt3", "strong"): "Figures 6(a), 11 and 13",
            ("p1b1", "strong"): "Figures 8(a), 14(a) and 15",
            ("p1b2", "strong"): "Figures 9(a), 16(a) and 17",
            ("p1b3", "batch"): "Figure 10(a)",
            ("nt3", "weak"): "Figure 18(a)",
            ("p1b1", "weak"): "Figure 20(a)",
            ("p1b2", "weak"): "Figure 21(a)",
        },
    ),
    FigureKind(
        "parts",
        "Where the time goes",
        "Medians of the parts of a run, each the mean over its ranks; the total time in s stands"
        " above. Communication is what of training a rank did nothing else in, and the transfer of"
        " the weights.",
        time_parts,
    ),
    FigureKind(
        "ranks",
        "Where each worker is at which time",
        "The run of each series on the most workers that has the median total time; of many workers"
        " some, evenly chosen. What stands between loading and training, waiting for the slowest"
        " loader and the transfer of the weights, is what the paper calls broadcast overhead.",
        ranks_over_time,
        {("nt3", "strong"): "Figures 7(b) and 12", ("nt3", "weak"): "Figure 19"},
    ),
    FigureKind(
        "improvement",
        "Improvement over the original",
        "(original - optimised) / original, in percent. Bars with caps are 95 % intervals, bars"
        " without caps the widest intervals that too few runs give.",
        gain,
        {
            ("nt3", "strong"): "Figures 11 and 13, Table 5",
            ("p1b1", "strong"): "Figures 14 and 15",
            ("p1b2", "strong"): "Figures 16 and 17",
            ("nt3", "weak"): "Figure 18",
            ("p1b1", "weak"): "Figure 20",
            ("p1b2", "weak"): "Figure 21",
        },
    ),
    FigureKind(
        "scaling",
        "Scaling",
        "T(base) / T(P), against the fewest workers of each series; efficiency under strong scaling"
        " is that divided by the ratio of the numbers of workers. Bars with caps are 95 %"
        " intervals, bars without caps the widest intervals that too few runs give; a dashed line"
        " is ideal.",
        scaling,
    ),
    FigureKind(
        "quality",
        "Quality against workers",
        "Left of the training samples in the last epoch, as in the paper; right of the test"
        " samples. " + BARS,
        quality,
        {
            ("nt3", "strong"): "Figure 6(b)",
            ("p1b1", "strong"): "Figure 8(b)",
            ("p1b2", "strong"): "Figure 9(b)",
            ("p1b3", "batch"): "Figure 10(b)",
            ("nt3", "weak"): "Table 6",
        },
    ),
    FigureKind(
        "epochs",
        "Quality against epochs per worker",
        "Runs that differ in the loader or in threads count together. " + BARS,
        epochs_per_worker,
        {
            ("nt3", "strong"): "Figure 6(b)",
            ("p1b1", "strong"): "Figure 8(b)",
            ("p1b2", "strong"): "Figure 9(b)",
        },
        whole=True,
    ),
    FigureKind(
        "exchange",
        "Time per epoch, communication and efficiency",
        "Time per epoch without validation and without the run's first step; communication's share"
        " of training is what a rank did nothing else in; efficiencies of the whole run as POP"
        " defines them. " + BARS,
        exchange,
        {("nt3", "strong"): "Table 2", ("nt3", "weak"): "Table 6"},
    ),
    FigureKind(
        "loaders",
        "Loading by file and loader",
        "Seconds of the slowest rank. " + BARS,
        loaders,
        {
            (name, mode): "Tables 3 and 4"
            for name in ("nt3", "p1b1", "p1b2", "p1b3")
            for mode in ("strong", "weak", "batch")
        },
        whole=True,
    ),
    FigureKind(
        "energy",
        "Energy and mean power",
        "Of what the sensors cover, over the whole run. " + BARS,
        energy,
        {
            ("nt3", "strong"): "Tables 2 and 5",
            ("p1b1", "strong"): "Figures 14(b) and 15",
            ("p1b2", "strong"): "Figures 16(b) and 17",
            ("nt3", "weak"): "Figure 18(b), Table 6",
            ("p1b1", "weak"): "Figure 20(b)",
            ("p1b2", "weak"): "Figure 21(b)",
        },
    ),
)
POWER_TITLE = "Power over time"


def draw_figures(experiment: Experiment, prefix: str) -> tuple[list[Drawing], list[Missing]]:
    """Draws all figures that an experiment has data for.

    Args:
        experiment: With at least one run whose times count.
        prefix: Of the figures' file names.

    Returns:
        The figures, and what could not be drawn.
    """
    drawn: list[Drawing] = []
    missing: list[Missing] = []
    with style():
        for kind in KINDS:
            facets = [experiment.series] if kind.whole else _facets(experiment)
            for i, series in enumerate(facets):
                slug = f"{prefix}-{kind.slug}" + (f"-{i + 1}" if len(facets) > 1 else "")
                try:
                    figure = kind.draw(experiment, [each for each in series if each.timed])
                except MissingDataError as error:
                    reason = Missing(kind.title, str(error))
                    missing += [reason] if reason not in missing else []
                    continue
                title = kind.title + (f" ({i + 1} of {len(facets)})" if len(facets) > 1 else "")
                paper = kind.paper.get((experiment.benchmark, experiment.mode))
                caption = kind.caption + (f" As the paper's {paper}." if paper else "")
                drawn.append(Drawing(slug, title, caption, to_svg(figure, slug), to_png(figure)))
        _draw_power(experiment, prefix, drawn, missing)
    return drawn, missing


def _draw_power(
    experiment: Experiment, prefix: str, drawn: list[Drawing], missing: list[Missing]
) -> None:
    """Draws power over time of one run of each series that has readings, of the first few."""
    reasons: dict[str, None] = {}
    num = 0
    for i, series in enumerate(experiment.series):
        if num == MAX_POWER_FIGURES:
            reasons[f"only that of the first {num} series is"] = None
            break
        try:
            run = run_to_draw(series)
        except MissingDataError as error:
            if not num and i + 1 == len(experiment.series):
                reasons[str(error)] = None
            continue
        try:
            figure = power_over_time(run)
        except DataError as error:
            reasons[str(error)] = None
            continue
        num += 1
        slug = f"{prefix}-power-{i + 1}"
        paper = " As the paper's Figure 7(a)." if _is_figure_7(experiment) else ""
        caption = (
            f"One run on {count(run.num_ranks, 'worker')}, {series.name}: phases of rank 0 behind"
            f" the power ({run.energy_kind}).{paper}"
        )
        drawn.append(Drawing(slug, POWER_TITLE, caption, to_svg(figure, slug), to_png(figure)))
    missing += [Missing(POWER_TITLE, reason) for reason in reasons]


def _is_figure_7(experiment: Experiment) -> bool:
    return (experiment.benchmark, experiment.mode) == ("nt3", STRONG)


def _facets(experiment: Experiment) -> list[list[Series]]:
    """Returns the series in groups that fit one figure each; what is compared stays together."""
    series = [each for each in experiment.series if each.timed]
    if len(series) <= MAX_SERIES:
        return [series]
    together: dict[str, list[Series]] = {}
    for each in series:
        others = {name: v for name, v in each.settings.items() if name not in ORIGINAL}
        together.setdefault(describe(others), []).append(each)
    facets: list[list[Series]] = [[]]
    for group in together.values():
        if facets[-1] and len(facets[-1]) + len(group) > MAX_SERIES:
            facets.append([])
        facets[-1] += group
    return facets
