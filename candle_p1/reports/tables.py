"""The tables of an experiment, each a small function; the paper's values stand beneath."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.improvements import Improvement, improvements, pairs
from candle_p1.reports.loading import file_loads
from candle_p1.reports.points import STRONG, WEAK
from candle_p1.reports.published import published, published_loading
from candle_p1.reports.quantities import (
    COMMUNICATION,
    COMMUNICATION_EFFICIENCY,
    ENERGY,
    EPOCH,
    FIRST_STEP,
    LOAD,
    LOAD_BALANCE,
    PARALLEL_EFFICIENCY,
    PARTS,
    POWER,
    SAMPLES,
    TOTAL,
    TRAIN,
    WAIT,
    Quantity,
    covered,
    labelled,
    merit,
    naive,
    quality_on_test,
    quality_on_training,
    share_of,
)
from candle_p1.reports.speedups import speedups
from candle_p1.reports.statistics import estimate_median, mean_rate
from candle_p1.reports.table import ReportTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from candle_p1.reports.points import Experiment, Point, Series
    from candle_p1.reports.table import Cell

TIMES = (TOTAL, LOAD, WAIT, TRAIN)
EPOCHS = (EPOCH, FIRST_STEP)


def times(experiment: Experiment, slug: str) -> ReportTable:
    """Returns medians of times for every point, with the runs behind them."""
    points = list(_points(experiment, unfinished=True))
    all_finished = not any(point.unfinished for _, point in points)
    rows = [
        (
            *_head(series, point),
            len(point.runs),
            None if all_finished else len(point.unfinished),
            *(point.estimate(quantity.of) for quantity in TIMES),
        )
        for series, point in points
    ]
    headings = ("series", "workers", "runs", "not finished", *_headings(TIMES))
    told = _published(experiment, "load_s", "broadcast_wait_s", "total_s", "dominates")
    return _table(slug, "Times", headings, rows, told, ("Medians; of the slowest rank.",))


def training(experiment: Experiment, slug: str) -> ReportTable:
    """Returns the time per epoch, the first step and the rate of training."""
    rows = [
        (
            *_head(series, point),
            _epochs(point),
            *(point.estimate(quantity.of) for quantity in EPOCHS),
            mean_rate(rates) if (rates := point.values(SAMPLES.of)) else None,
        )
        for series, point in _points(experiment)
    ]
    headings = ("series", "workers", "epochs per worker", *_headings((*EPOCHS, SAMPLES)))
    note = (
        "Medians of the slowest rank; of the rate the harmonic mean. Time per epoch is without"
        " validation and without the run's first step, a warm-up, which stands apart; the rate is"
        " of all steps, with the first."
    )
    return _table(slug, "Training", headings, rows, _published(experiment, "epoch_s"), (note,))


def shares(experiment: Experiment, slug: str) -> ReportTable:
    """Returns the parts' shares of the total time."""
    rows = [
        (*_head(series, point), *(_percent(point, share_of(part)) for part in PARTS))
        for series, point in _points(experiment)
    ]
    headings = ("series", "workers", *(f"{part} (%)" for part in PARTS))
    return _table(slug, "Shares of the total time", headings, rows)


def scaling(experiment: Experiment, slug: str) -> ReportTable:
    """Returns speed-ups and efficiencies, each with its base in seconds."""
    rows: list[tuple[Cell, ...]] = []
    for series in experiment.series:
        for quantity in (TOTAL, TRAIN):
            rows += [
                (
                    series.name,
                    quantity.title,
                    each.point.num_ranks,
                    each.base.num_ranks,
                    each.base_s,
                    each.speedup,
                    each.efficiency,
                )
                for each in speedups(experiment, series, quantity.of)
            ]
    gain = "speed-up" if experiment.mode == STRONG else "T(base) / T(P)"
    headings = (
        "series", "of", "workers", "base: workers", "base: time (s)", gain, "efficiency",
    )  # fmt: skip
    note = {
        STRONG: "Efficiency is the speed-up divided by the ratio of the numbers of workers.",
        WEAK: "Under weak scaling the efficiency is T(base) / T(P): the work grows with P.",
    }
    notes = [note[experiment.mode]] if experiment.mode in note else []
    return _table(slug, "Speed-up and efficiency", headings, rows, (), notes)


def gains(experiment: Experiment, slug: str) -> ReportTable:
    """Returns improvements in percent, on each number of workers and over all."""
    rows: list[tuple[Cell, ...]] = []
    comparable = len(covered(experiment.runs)) == 1
    energy = [labelled(ENERGY, experiment.runs)] if comparable else []
    for original, optimised in pairs(experiment):
        for quantity in (TOTAL, *energy, LOAD):
            rows += [
                (
                    quantity.title,
                    optimised.name,
                    original.name,
                    _workers(each),
                    each.percent,
                    each.verdict,
                )
                for each in improvements(original, optimised, quantity.of)
            ]
    headings = ("of", "optimised", "original", "workers", "improvement (%)", "claim")
    notes = _published(
        experiment, "improvement_total_s", "improvement_energy_j", "improvement_load_s"
    )
    return _table(
        slug,
        "Improvement",
        headings,
        rows,
        notes,
        (
            '(original - optimised) / original. The row "all, paired" is the median over pairs of'
            ' runs with the same workers and seed. "Shown" where a 95 % interval excludes 0.',
        ),
    )


def qualities(experiment: Experiment, slug: str) -> ReportTable:
    """Returns the figure of merit on training and test samples, and the naive predictor's."""
    name = merit(experiment.runs)
    shown = (quality_on_training(name), quality_on_test(name), naive(name)) if name else ()
    rows = [
        (
            *_head(series, point),
            _epochs(point),
            point.runs[0].batch_size,
            *(point.estimate(quantity.of) for quantity in shown),
        )
        for series, point in _points(experiment)
        if shown
    ]
    headings = ("series", "workers", "epochs per worker", "batch size", *_headings(shown))
    notes = _published(
        experiment, "accuracy", "loss", "epochs_needed", "epochs_to_run", "best_strategy"
    )
    return _table(slug, "Quality", headings, rows, notes)


def power(experiment: Experiment, slug: str) -> ReportTable:
    """Returns time per epoch, mean power and energy: the paper's Tables 2, 5 and 6."""
    shown = (EPOCH, *(labelled(each, experiment.runs) for each in (POWER, ENERGY)))
    rows = [
        (*_head(series, point), *(point.estimate(quantity.of) for quantity in shown))
        for series, point in _points(experiment)
        if point.values(ENERGY.of)
    ]
    notes = _published(experiment, "power_w", "epoch_s")
    return _table(
        slug,
        "Time per epoch, power and energy",
        ("series", "workers", *_headings(shown)),
        rows,
        notes,
    )


def efficiency(experiment: Experiment, slug: str) -> ReportTable:
    """Returns communication's share and POP's efficiencies, where there are several ranks."""
    shown = (LOAD_BALANCE, COMMUNICATION_EFFICIENCY, PARALLEL_EFFICIENCY)
    rows = [
        (
            *_head(series, point),
            _percent(point, COMMUNICATION.of),
            *(point.estimate(quantity.of) for quantity in shown),
        )
        for series, point in _points(experiment)
        if point.num_ranks > 1
    ]
    headings = ("series", "workers", "communication in training (%)", *_headings(shown))
    return _table(slug, "Communication and efficiency (POP)", headings, rows)


def loading(experiment: Experiment, slug: str) -> ReportTable:
    """Returns the time to load each file, by loader, with the paper's Tables 3 and 4 beneath."""
    rows: list[tuple[Cell, ...]] = [
        (load.role, load.file_mb, load.method, load.num_ranks, load.estimate, "measured")
        for load in file_loads(experiment, experiment.series)
    ]
    if rows:
        rows += [
            (
                each.role,
                each.file_mb,
                f"loader {each.loader}",
                None,
                each.seconds,
                f"published: {each.machine}, Table {each.table}",
            )
            for each in published_loading(experiment.benchmark)
        ]
    headings = ("file", "MB", "loader", "workers", "time (s)", "from")
    return _table(slug, "Loading by file", headings, rows)


KINDS: dict[str, Callable[[Experiment, str], ReportTable]] = {
    "times": times,
    "training": training,
    "shares": shares,
    "improvement": gains,
    "scaling": scaling,
    "quality": qualities,
    "efficiency": efficiency,
    "power": power,
    "loading": loading,
}
"""By the last part of their slug."""


def make_tables(experiment: Experiment, prefix: str) -> list[ReportTable]:
    """Returns the tables of an experiment that have rows, without columns that hold nothing."""
    made = (make(experiment, f"{prefix}-{name}") for name, make in KINDS.items())
    return [table.without_empty_columns() for table in made if table.rows]


def _table(
    slug: str,
    title: str,
    headings: Sequence[str],
    rows: Sequence[tuple[Cell, ...]],
    published_notes: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> ReportTable:
    return ReportTable(slug, title, tuple(headings), tuple(rows), notes=(*notes, *published_notes))


def _points(experiment: Experiment, unfinished: bool = False) -> Iterator[tuple[Series, Point]]:
    for series in experiment.series:
        for point in series.points:
            if point.runs or (unfinished and point.unfinished):
                yield series, point


def _head(series: Series, point: Point) -> tuple[str, int]:
    return series.name, point.num_ranks


def _headings(quantities: tuple[Quantity, ...]) -> tuple[str, ...]:
    return tuple(quantity.heading for quantity in quantities)


def _percent(point: Point, share: Callable[..., float | None]) -> Cell:
    values = point.values(share)
    return estimate_median([100 * value for value in values]) if values else None


def _epochs(point: Point) -> Cell:
    """Returns the epochs of each worker; of runs that were stopped early "3 to 7"."""
    found = sorted({epochs for run in point.runs if (epochs := run.epochs_per_rank) is not None})
    if len(found) > 1:
        return f"{found[0]} to {found[-1]}"
    return found[0] if found else None


def _workers(improvement: Improvement) -> str:
    num = improvement.num_ranks
    return "all, paired" if num is None else f"{num:,}"


def _published(experiment: Experiment, *quantities: str) -> list[str]:
    found = (
        each
        for name in quantities
        for each in published(experiment.benchmark, experiment.mode, name)
    )
    return [str(each) for each in found]
