"""The tables of an experiment, each with the values that the paper prints beneath it."""

from __future__ import annotations

from operator import neg
from statistics import harmonic_mean
from typing import TYPE_CHECKING

from candle_p1.reports.gains import improvements, method_pairs, other_pairs, speedups
from candle_p1.reports.loading import file_loads
from candle_p1.reports.model_tables import what_if_table
from candle_p1.reports.modelled import model_experiment
from candle_p1.reports.points import STRONG, WEAK
from candle_p1.reports.published import EPOCHS_TOLD, all_published, published, published_loading
from candle_p1.reports.quantities import (
    BROADCAST,
    COMMUNICATION,
    COMMUNICATION_EFFICIENCY,
    ENERGY,
    EPOCH,
    FIRST_STEP,
    LOAD,
    LOAD_BALANCE,
    PARALLEL_EFFICIENCY,
    PARTS,
    POWER_AND_ENERGY,
    SAMPLES,
    TOTAL,
    TRAIN,
    TRANSFER,
    WAIT,
    comparable_energy,
    labelled,
    merit,
    naive,
    qualities,
    share_of,
)
from candle_p1.reports.statistics import estimate_median
from candle_p1.reports.table import ReportTable
from candle_p1.reports.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from candle_p1.reports.gains import Pair
    from candle_p1.reports.points import Experiment, Point, Series
    from candle_p1.reports.quantities import Quantity
    from candle_p1.reports.table import Cell

    Column = tuple[str, Callable[[Point], Cell]]
    """A heading, and what a column of a table of points shows."""


def make_tables(experiment: Experiment, prefix: str) -> list[ReportTable]:
    """Returns the tables of an experiment that have rows, without empty columns."""
    tables = []
    for slug, make in KINDS.items():
        title, headings, rows, notes, quantities = make(experiment)
        if rows:
            told = published(experiment, *quantities)
            beneath = (*notes, *map(str, told))
            table = ReportTable(f"{prefix}-{slug}", title, tuple(headings), tuple(rows), beneath)
            tables.append(table.without_empty_columns())
    models, _ = model_experiment(experiment)
    return tables + ([what_if_table(models, prefix)] if models else [])


Content = tuple[str, "Sequence[str]", "list[tuple[Cell, ...]]", "Sequence[str]", "Sequence[str]"]
"""Title, headings, rows, notes, and the quantities of which the paper's values belong to it."""


def times(experiment: Experiment) -> Content:
    """Returns medians of times for every point, with the number of runs."""
    points = list(_points(experiment, unfinished=True))
    all_finished = not any(point.unfinished for _, point in points)
    columns: list[Column] = [
        ("runs", lambda point: len(point.runs)),
        ("not finished", lambda point: None if all_finished else len(point.unfinished)),
        *map(_column, (TOTAL, LOAD, BROADCAST, WAIT, TRANSFER, TRAIN)),
    ]
    note = (
        "Medians of the slowest rank. The broadcast overhead is the paper's: from the first rank"
        " that is ready to broadcast to the end of the broadcast, that is, waiting for the slowest"
        " loader and the transfer of the weights."
    )
    told = ("load_s", "broadcast_overhead_s", "total_s", "batch_size_limit", "dominates")
    return "Times", *_of_points(points, columns), (note,), told


def training(experiment: Experiment) -> Content:
    """Returns the time per epoch, the first step and the rate of training."""
    columns = (
        ("epochs per rank", _epochs),
        *map(_column, (EPOCH, FIRST_STEP)),
        (SAMPLES.heading, _mean_rate),
    )
    note = (
        "Medians of the slowest rank; for the rate, the harmonic mean. The time per epoch excludes"
        " validation and the first step of the run, which is a warm-up and has a column of its own;"
        " the rate includes all steps."
    )
    return "Training", *_of_points(_points(experiment), columns), (note,), ("epoch_s",)


def shares(experiment: Experiment) -> Content:
    """Returns the parts' shares of the total time."""
    columns = [_percent_column(part, share_of(part)) for part in PARTS]
    return "Shares of the total time", *_of_points(_points(experiment), columns), (), ()


def scaling(experiment: Experiment) -> Content:
    """Returns speed-ups and scaling efficiencies, each with the time of its base."""
    found = [
        (series, quantity, each)
        for series in experiment.series
        for quantity in (TOTAL, TRAIN)
        for each in speedups(experiment, series, quantity.of)
    ]
    rows: list[tuple[Cell, ...]] = [
        (
            series.name,
            quantity.title,
            each.point.num_ranks,
            each.base.num_ranks,
            each.base_s,
            each.speedup,
            each.efficiency,
        )
        for series, quantity, each in found
    ]
    gain = "speed-up" if experiment.mode == STRONG else "T(base) / T(P)"
    headings = (
        "series", "quantity", "ranks", "base: ranks", "base: time (s)", gain, "scaling efficiency",
    )  # fmt: skip
    note = {
        STRONG: "Scaling efficiency is the speed-up divided by the ratio of the numbers of ranks.",
        WEAK: "Scaling efficiency is T(base) / T(P), because the work grows with P.",
    }
    notes = [note[experiment.mode]] if experiment.mode in note else []
    apart = {
        f"{series.name}: {each.compiled_apart}." for series, _, each in found if each.compiled_apart
    }
    notes += sorted(apart)
    return "Speed-up and scaling efficiency", headings, rows, notes, ()


def method_gains(experiment: Experiment) -> Content:
    """Returns what the paper's method gains, followed by what the paper states."""
    told = (
        "improvement_total_s",
        "improvement_energy_j",
        "change_power_w",
        "improvement_load_s",
        "improvement_broadcast_overhead_s",
    )
    title = "Improvement by the paper's loading (chunked against original)"
    return title, *_gains(experiment, method_pairs(experiment)), told


def other_gains(experiment: Experiment) -> Content:
    """Returns what other loaders, and kernels, gain; the paper states nothing about these."""
    return (
        "Improvement by other loaders and kernels",
        *_gains(experiment, other_pairs(experiment)),
        (),
    )


def _gains(
    experiment: Experiment, pairs: Sequence[Pair]
) -> tuple[Sequence[str], list[tuple[Cell, ...]], Sequence[str]]:
    """Returns improvements in percent, on each number of ranks and over all."""
    measured = comparable_energy(experiment.runs)
    power_of = {energy: power for power, energy in measured}
    rows: list[tuple[Cell, ...]] = []
    for pair in pairs:
        for quantity in (TOTAL, *power_of, LOAD, BROADCAST):
            power = power_of.get(quantity)
            powers = improvements(*pair, power.of) if power else []
            changes = {each.num_ranks: each.percent.map(neg) for each in powers}
            rows += [
                (
                    quantity.title,
                    pair.other.name,
                    pair.base.name,
                    "all, paired" if each.num_ranks is None else f"{each.num_ranks:,}",
                    each.percent,
                    each.verdict,
                    changes.get(each.num_ranks),
                )
                for each in improvements(*pair, quantity.of)
            ]
    change = f"change of {measured[0][0].title} (%)" if measured else ""
    headings = ("quantity", "series", "base", "ranks", "improvement (%)", "claim", change)
    note = (
        '(base - series) / base. Rows "all, paired" are the median over pairs of runs with the same'
        ' number of ranks and the same seed. A claim is "significant" where a 95 % interval'
        " excludes 0."
    )
    return headings, rows, (note,)


def quality(experiment: Experiment) -> Content:
    """Returns the figure of merit on training and test samples, and the naive predictor's."""
    name = merit(experiment.runs)
    shown = (*qualities(name), naive(name)) if name else ()
    columns: list[Column] = [
        ("epochs per rank", _epochs),
        ("batch size", lambda point: point.runs[0].plan.get("batch_size")),
        *map(_column, shown),
    ]
    told = ("accuracy", "loss", *EPOCHS_TOLD, "best_strategy")
    points = _points(experiment) if name else ()
    return "Quality", *_of_points(points, columns), (), told


def power(experiment: Experiment) -> Content:
    """Returns time per epoch, mean power and energy: the paper's Tables 2, 5 and 6."""
    shown = (each for pair in POWER_AND_ENERGY for each in pair)
    columns = (EPOCH, *(labelled(each, experiment.runs) for each in shown))
    points = [each for each in _points(experiment) if each[1].values(ENERGY.of)]
    content = _of_points(points, list(map(_column, columns)))
    rates = {run.power_hz for _, point in points for run in point.runs if run.power_hz}
    note = (
        "Per GPU: means over all GPUs. Per node: means over the nodes, the devices of a node added"
        f" up. Power was read at {listed([f'{hz:g}' for hz in sorted(rates)])} Hz (--power_hz)."
    )
    of_paper = [str(each) for each in all_published() if each.quantity == "power_rate"]
    return "Time per epoch, power and energy", *content, (note, *of_paper), ("epoch_s",)


def efficiency(experiment: Experiment) -> Content:
    """Returns communication's share and POP's efficiencies, where there are several ranks."""
    columns = [
        _percent_column("communication in training", COMMUNICATION.of),
        *map(_column, (LOAD_BALANCE, COMMUNICATION_EFFICIENCY, PARALLEL_EFFICIENCY)),
    ]
    points = [each for each in _points(experiment) if each[1].num_ranks > 1]
    return "Communication and POP efficiency", *_of_points(points, columns), (), ()


def loading(experiment: Experiment) -> Content:
    """Returns the time to load each file, by loader, followed by the paper's Tables 3 and 4."""
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
    return "Loading by file", ("file", "MB", "loader", "ranks", "time (s)", "source"), rows, (), ()


KINDS: dict[str, Callable[[Experiment], Content]] = {
    "times": times,
    "training": training,
    "shares": shares,
    "improvement": method_gains,
    "other-improvement": other_gains,
    "scaling": scaling,
    "quality": quality,
    "efficiency": efficiency,
    "power": power,
    "loading": loading,
}
"""By the last part of their slug."""


def _points(experiment: Experiment, unfinished: bool = False) -> Iterator[tuple[Series, Point]]:
    for series in experiment.series:
        for point in series.points:
            if point.runs or (unfinished and point.unfinished):
                yield series, point


def _of_points(
    points: Iterable[tuple[Series, Point]], columns: Sequence[Column]
) -> tuple[Sequence[str], list[tuple[Cell, ...]]]:
    """Returns headings, and a row per point."""
    rows = [
        (series.name, point.num_ranks, *(make(point) for _, make in columns))
        for series, point in points
    ]
    return ("series", "ranks", *(heading for heading, _ in columns)), rows


def _column(quantity: Quantity) -> Column:
    return quantity.heading, lambda point: point.estimate(quantity.of)


def _mean_rate(point: Point) -> Cell:
    """Returns all work over all time."""
    rates = point.values(SAMPLES.of)
    return harmonic_mean(rates) if rates else None


def _percent_column(title: str, share: Callable[..., float | None]) -> Column:
    def percent(point: Point) -> Cell:
        values = point.values(share)
        return estimate_median([100 * value for value in values]) if values else None

    return f"{title} (%)", percent


def _epochs(point: Point) -> Cell:
    """Returns the epochs of each rank, as "3 to 7" where some runs were stopped early."""
    found = sorted({epochs for run in point.runs if (epochs := run.epochs_per_rank) is not None})
    if len(found) > 1:
        return f"{found[0]} to {found[-1]}"
    return found[0] if found else None
