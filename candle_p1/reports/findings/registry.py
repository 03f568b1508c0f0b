"""All kinds of statements, and those that an experiment's records support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.reports.findings.comparing import (
    batch_strategies,
    method_loading,
    other_loading,
    other_settings,
)
from candle_p1.reports.findings.phrases import MAX_SENTENCES, Inconclusive
from candle_p1.reports.findings.quality import epochs_needed
from candle_p1.reports.findings.speed import (
    epoch_growth,
    method_energy,
    method_time,
    other_energy,
    other_time,
    speed,
)
from candle_p1.reports.findings.time import dominates, what_to_change
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.published import EPOCHS_TOLD, published

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from candle_p1.reports.points import Experiment


@dataclass(frozen=True)
class Finder:
    """A kind of statement.

    Attributes:
        what: What it is about.
        table: The last part of the slug of the table that has its numbers.
        find: Returns sentences; raises MissingDataError where the records lack what they need.
        published: The quantities of which the paper's values belong to it.
        is_headline: Whether it belongs in the summary.
    """

    what: str
    table: str
    find: Callable[[Experiment], Iterable[str]]
    published: tuple[str, ...] = ()
    is_headline: bool = False


@dataclass(frozen=True)
class Statement:
    """What the records of an experiment say about one thing.

    Attributes:
        finder: Its kind.
        sentences: What the records show.
        published: What the paper says about the same.
        unsure: What the records show without significance.
        lacking: What could not be said and which data are missing; "" where nothing is.
    """

    finder: Finder
    sentences: tuple[str, ...]
    published: tuple[str, ...]
    unsure: tuple[str, ...]
    lacking: str


FINDERS = (
    Finder("What dominates", "shares", dominates, ("dominates",), is_headline=True),
    Finder(
        "Total time with the paper's loading",
        "improvement",
        method_time,
        ("improvement_total_s",),
        is_headline=True,
    ),
    Finder(
        "Total time with other loaders and kernels",
        "other-improvement",
        other_time,
        is_headline=True,
    ),
    Finder(
        "Energy with the paper's loading",
        "improvement",
        method_energy,
        ("improvement_energy_j",),
        is_headline=True,
    ),
    Finder(
        "Energy with other loaders and kernels",
        "other-improvement",
        other_energy,
        is_headline=True,
    ),
    Finder(
        "Epochs per rank",
        "quality",
        epochs_needed,
        (*EPOCHS_TOLD, "loss"),
        is_headline=True,
    ),
    Finder(
        "Scaling of the batch size",
        "quality",
        batch_strategies,
        ("best_strategy", "total_s", "batch_size_limit", "accuracy"),
        is_headline=True,
    ),
    Finder("What to change", "shares", what_to_change, is_headline=True),
    Finder("Speed-up", "scaling", speed),
    Finder("Time per epoch", "training", epoch_growth, ("epoch_s",)),
    Finder("The paper's loading", "loading", method_loading, ("improvement_load_s",)),
    Finder("Other loaders", "loading", other_loading),
    Finder("Other settings", "times", other_settings),
)


def find(experiment: Experiment) -> list[Statement]:
    """Returns what the records of an experiment show, and what they do not allow one to say."""
    return [_state(finder, experiment) for finder in FINDERS]


def _state(finder: Finder, experiment: Experiment) -> Statement:
    found: list[str] = []
    lacking = ""
    try:
        found.extend(finder.find(experiment))
        lacking = "" if found else "no runs can be compared"
    except MissingDataError as error:
        lacking = str(error)
    unsure = [text for text in found if isinstance(text, Inconclusive)]
    sure = (text for text in found if not isinstance(text, Inconclusive))
    sentences = [_sentence(text, experiment) for text in sure]
    told = published(experiment, *finder.published)
    return Statement(
        finder,
        tuple(sentences),
        tuple(map(str, told)) if sentences else (),
        tuple(unsure[:MAX_SENTENCES]),
        lacking,
    )


def _sentence(text: str, experiment: Experiment) -> str:
    """Begins a sentence with a capital letter, unless it begins with the name of a series."""
    if any(text.startswith(series.name) for series in experiment.series):
        return text
    return text[0].upper() + text[1:]
