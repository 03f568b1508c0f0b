"""The topics of a report: what the section of an experiment tabulates and draws."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import harmonic_mean

from candle_p1.reports import columns as c
from candle_p1.reports.columns import Quantity
from candle_p1.reports.experiments import Experiment, Point
from candle_p1.reports.frame import PARTS
from candle_p1.reports.published import all_published, published
from candle_p1.reports.quality import of_each_seed
from candle_p1.reports.render import Cell, Content, ReportTable
from candle_p1.reports.speed import gains_table, loading_table, scaling_table
from candle_p1.reports.statistics import estimate_mean
from candle_p1.reports.words import contents, file_name, listed

Column = Quantity | tuple[str, Callable[[Point], Cell]]
"""A quantity, of which the median is shown, or a heading and what its column shows of a point."""


@dataclass(frozen=True)
class Topic:
    """What the section of an experiment says about one thing; contents.toml explains the fields."""

    slug: str
    title: str
    figures: Sequence[str] = ()
    published: Sequence[str] = ()
    note: str = ""

    def make_table(self, experiment: Experiment, prefix: str) -> ReportTable | None:
        """Returns its table without empty columns; None if it has no rows."""
        headings, rows, notes = TABLES[self.slug](experiment)
        if not rows:
            return None
        notes = [self.note] * bool(self.note) + [*notes]
        notes += map(str, published(experiment, *self.published))
        table = ReportTable(f"{prefix}-{self.slug}", self.title, headings, rows, notes)
        return table.without_empty_columns()


def of_points(
    experiment: Experiment,
    columns: Sequence[Column],
    which: Callable[[Point], object] = lambda point: len(point.runs),
) -> Content:
    """Returns a table with a row for each point that has runs with times."""
    headings = [each.heading if isinstance(each, Quantity) else each[0] for each in columns]
    rows = [
        (
            *(series.name, point.num_ranks),
            *(point.estimate(e) if isinstance(e, Quantity) else e[1](point) for e in columns),
        )
        for series in experiment.series
        for point in series.points
        if which(point)
    ]
    return ("series", "ranks", *headings), rows, []


def _times(experiment: Experiment) -> Content:
    columns: list[Column] = [("runs", lambda point: len(point.runs))]
    if (experiment.all_runs["status"] != "ok").any():
        columns.append(("not finished", lambda point: point.num_unfinished))
    columns += [c.TOTAL, c.LOAD, c.BROADCAST, c.WAIT, c.TRANSFER, c.TRAIN]
    return of_points(experiment, columns, lambda p: len(p.runs) or p.num_unfinished)


def _epochs(point: Point) -> Cell:
    """Returns the epochs of each rank, as "3 to 7" where some runs were stopped early."""
    found = sorted(set(point.values("epochs_per_rank")))
    if len(found) > 1:
        return f"{found[0]} to {found[-1]}"
    return found[0] if found else None


def _mean_rate(point: Point) -> Cell:
    """Returns all work over all time."""
    rates = point.values(c.SAMPLES)
    return harmonic_mean(rates) if rates else None


def _batch_size(point: Point) -> Cell:
    size: Cell = point.runs["run"].iloc[0]["plan_batch_size"]
    return size


EPOCHS_PER_RANK = ("epochs per rank", _epochs)


def _quality(experiment: Experiment) -> Content:
    name = c.merit(experiment.runs)
    if not name:
        return [], [], []
    batch_size = ("batch size", _batch_size)
    on_test = c.quality_on_test(name)

    def mean(point: Point) -> Cell:
        """Returns the mean over repeats and folds, also of runs that were continued."""
        runs = point.all_runs[point.all_runs["status"] == "ok"]
        return estimate_mean(of_each_seed(runs, on_test), max(runs["folds"], default=0))

    shown: list[Column] = [EPOCHS_PER_RANK, batch_size, *c.qualities(name), c.naive(name)]
    shown.append((f"mean {on_test.title}", mean))
    headings, rows, notes = of_points(experiment, shown)
    return headings, rows, [*notes, *[contents()["mean"]["note"]] * any(row[-1] for row in rows)]


def _efficiency(experiment: Experiment) -> Content:
    communication = Quantity("communication_percent", "communication in training", "%")
    shown = (communication, c.LOAD_BALANCE, c.COMMUNICATION_EFFICIENCY, c.PARALLEL_EFFICIENCY)
    return of_points(experiment, shown, lambda p: p.num_ranks > 1 and len(p.runs))


def _power(experiment: Experiment) -> Content:
    """Returns time per epoch, mean power and energy: the paper's Tables 2, 5 and 6."""
    runs = experiment.runs
    columns = (c.EPOCH, *(c.labelled(e, runs) for pair in c.POWER_AND_ENERGY for e in pair))
    rates = sorted({hz for hz in c.known(runs[runs["energy_j"].notna()], "power_hz") if hz})
    note = contents()["power"]["note"].format(rates=listed([f"{hz:g}" for hz in rates]))
    headings, rows, _ = of_points(experiment, columns, lambda p: p.values(c.ENERGY))
    of_paper = [str(each) for each in all_published() if each.quantity == "power_rate"]
    return headings, rows, [note, *of_paper]


TABLES: dict[str, Callable[[Experiment], Content]] = {
    "times": _times,
    "shares": partial(
        of_points, columns=[Quantity(f"percent_{part}", part, "%") for part in PARTS]
    ),
    "training": partial(
        of_points,
        columns=(EPOCHS_PER_RANK, c.EPOCH, c.FIRST_STEP, (c.SAMPLES.heading, _mean_rate)),
    ),
    "improvement": partial(gains_table, of_method=True),
    "other-improvement": partial(gains_table, of_method=False),
    "scaling": scaling_table,
    "quality": _quality,
    "efficiency": _efficiency,
    "power": _power,
    "loading": loading_table,
}
"""What makes the table of a topic."""

TOPICS = [Topic(**each) for each in contents()["topics"]]


def free_slug(experiment: Experiment, taken: Collection[str]) -> str:
    """Returns the beginning of the names of a section's files, which no other section has."""
    stem = f"{file_name(experiment.benchmark)}-{experiment.mode}"
    slugs = (stem, *(f"{stem}-{i}" for i in range(2, len(taken) + 2)))
    return next(each for each in slugs if each not in taken)
