"""The topics of a report: what the section of an experiment says, draws and tabulates."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from candle_p1.reports.experiments import Experiment
from candle_p1.reports.published import EPOCHS_TOLD, published
from candle_p1.reports.render import Content, ReportTable
from candle_p1.reports.speed import method_gains_table, other_gains_table, scaling_table
from candle_p1.reports.times import (
    efficiency_table,
    loading_table,
    power_table,
    quality_table,
    shares_table,
    times_table,
    training_table,
)
from candle_p1.reports.words import file_name


@dataclass(frozen=True)
class Topic:
    """What the section of an experiment says about one thing.

    Attributes:
        slug: The last part of its anchor, of its table's files, and what findings refer to.
        title: Its heading.
        table: Returns headings, rows and notes of its table.
        figures: The kinds of figures that it shows.
        published: The quantities of which the paper's values stand beneath its table.
    """

    slug: str
    title: str
    table: Callable[[Experiment], Content]
    figures: tuple[str, ...] = ()
    published: tuple[str, ...] = ()


TOPICS = (
    Topic(
        "times",
        "Times",
        times_table,
        ("performance",),
        ("load_s", "broadcast_overhead_s", "total_s", "batch_size_limit", "dominates"),
    ),
    Topic("shares", "Shares of the total time", shares_table, ("parts", "ranks")),
    Topic("training", "Training", training_table, (), ("epoch_s",)),
    Topic(
        "improvement",
        "Improvement by the paper's loading (chunked against original)",
        method_gains_table,
        ("improvement",),
        (
            "improvement_total_s",
            "improvement_energy_j",
            "change_power_w",
            "improvement_load_s",
            "improvement_broadcast_overhead_s",
        ),
    ),
    Topic("other-improvement", "Improvement by other loaders and kernels", other_gains_table),
    Topic("scaling", "Speed-up and scaling efficiency", scaling_table, ("scaling",)),
    Topic(
        "quality",
        "Quality",
        quality_table,
        ("quality", "epochs"),
        ("accuracy", "loss", *EPOCHS_TOLD, "best_strategy"),
    ),
    Topic(
        "efficiency",
        "Communication and POP efficiency",
        efficiency_table,
        ("communication", "timeline"),
    ),
    Topic(
        "power",
        "Time per epoch, power and energy",
        power_table,
        ("energy", "power"),
        ("epoch_s",),
    ),
    Topic("loading", "Loading by file", loading_table, ("loaders",)),
)


def free_slug(experiment: Experiment, taken: Collection[str]) -> str:
    """Returns the beginning of the names of a section's files, which no other section has."""
    stem = f"{file_name(experiment.benchmark)}-{experiment.mode}"
    slugs = (stem, *(f"{stem}-{i}" for i in range(2, len(taken) + 2)))
    return next(each for each in slugs if each not in taken)


def topic_table(experiment: Experiment, topic: Topic, prefix: str) -> ReportTable | None:
    """Returns the table of a topic without empty columns, or None if it has no rows."""
    headings, rows, notes = topic.table(experiment)
    if not rows:
        return None
    told = map(str, published(experiment, *topic.published))
    name = f"{prefix}-{topic.slug}"
    return ReportTable(name, topic.title, headings, rows, (*notes, *told)).without_empty_columns()
