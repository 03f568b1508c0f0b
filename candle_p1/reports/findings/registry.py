"""All kinds of statements, and what an experiment's records say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.findings.comparing import batch_strategies, loaders, other_settings
from candle_p1.reports.findings.gains import energy_gain, time_gain
from candle_p1.reports.findings.quality import epochs_needed
from candle_p1.reports.findings.scaling import epoch_growth, speed
from candle_p1.reports.findings.statement import Finder, Statement
from candle_p1.reports.findings.time import dominates, what_to_change
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.published import published

if TYPE_CHECKING:
    from candle_p1.reports.points import Experiment

FINDERS = (
    Finder("What dominates", "shares", dominates, ("dominates",), is_headline=True),
    Finder(
        "Total time against the original",
        "improvement",
        time_gain,
        ("improvement_total_s",),
        is_headline=True,
    ),
    Finder(
        "Energy against the original",
        "improvement",
        energy_gain,
        ("improvement_energy_j",),
        is_headline=True,
    ),
    Finder(
        "Epochs per worker",
        "quality",
        epochs_needed,
        ("epochs_needed", "epochs_to_run", "loss"),
        is_headline=True,
    ),
    Finder(
        "Scaling of the batch size",
        "quality",
        batch_strategies,
        ("best_strategy", "total_s", "accuracy"),
        is_headline=True,
    ),
    Finder("What to change", "shares", what_to_change, is_headline=True),
    Finder("Speed-up", "scaling", speed),
    Finder("Time per epoch", "training", epoch_growth, ("epoch_s",)),
    Finder("Loaders", "loading", loaders, ("improvement_load_s",)),
    Finder("Other settings", "times", other_settings),
)


def find(experiment: Experiment) -> list[Statement]:
    """Returns what the records of an experiment show, and what they do not allow to say."""
    return [_state(finder, experiment) for finder in FINDERS]


def _state(finder: Finder, experiment: Experiment) -> Statement:
    sentences: list[str] = []
    lacking = ""
    try:
        sentences.extend(_sentence(text, experiment) for text in finder.find(experiment))
        lacking = "" if sentences else "no runs that can be compared"
    except MissingDataError as error:
        lacking = str(error)
    told = [
        str(each)
        for name in finder.published
        for each in published(experiment.benchmark, experiment.mode, name)
    ]
    return Statement(
        finder.what,
        finder.table,
        tuple(sentences),
        tuple(told) if sentences else (),
        lacking,
        finder.is_headline,
    )


def _sentence(text: str, experiment: Experiment) -> str:
    """Begins a sentence with a capital letter, unless it begins with the name of a series."""
    if any(text.startswith(series.name) for series in experiment.series):
        return text
    return text[0].upper() + text[1:]
