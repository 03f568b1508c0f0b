"""The page of ``candle-p1 model``: the models of all experiments, their figures and tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ModelError
from candle_p1.reports.figures.registry import draw_figures, model_kinds
from candle_p1.reports.held_out import held_out_table, held_out_times, runs_inside
from candle_p1.reports.model_tables import model_tables
from candle_p1.reports.modelled import (
    ModelOptions,
    badly_fitted,
    fitted_words,
    model_experiment,
)
from candle_p1.reports.points import group
from candle_p1.reports.report import free_slug, section_title
from candle_p1.reports.table import LEGEND
from candle_p1.reports.words import listed
from candle_p1.reports.writing import PAGE_NAME, files_of, rendered, write_page
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from candle_p1.modelling.communication import CommunicationFit
    from candle_p1.modelling.model import RunModel
    from candle_p1.modelling.phase_fit import FittedParameter
    from candle_p1.reports.drawing import Drawing
    from candle_p1.reports.held_out import HeldOutTime
    from candle_p1.reports.modelled import ModelledSeries
    from candle_p1.reports.points import Experiment
    from candle_p1.reports.runs import Runs
    from candle_p1.reports.table import ReportTable

JSON_NAME = "model.json"


@dataclass(frozen=True)
class ModelSection:
    """The models of one experiment.

    Attributes:
        experiment: The experiment.
        slug: The beginning of the names of its files, and its anchor on the page.
        notes: What a reader has to know.
        modelled: Its series that have models.
        held_out: The times of runs that these were not fitted to.
        missing: The names of those without, with the reasons; and of figures, likewise.
        figures: The figures.
        tables: The tables.
    """

    experiment: Experiment
    slug: str
    notes: Sequence[str]
    modelled: Sequence[ModelledSeries]
    held_out: Sequence[HeldOutTime]
    missing: Sequence[tuple[str, str]]
    figures: Sequence[Drawing]
    tables: Sequence[ReportTable]

    @property
    def title(self) -> str:
        """Benchmark, mode, and whether the steps are limited."""
        return section_title(self.experiment)


@dataclass(frozen=True)
class ModelReport:
    """The models of some runs.

    Attributes:
        notes: On all of them together.
        sections: One for each experiment.
    """

    notes: Sequence[str]
    sections: Sequence[ModelSection]

    def to_dict(self) -> dict[str, Any]:
        """Returns all models as JSON."""
        return {
            "notes": list(self.notes),
            "sections": [
                {
                    "benchmark": section.experiment.benchmark,
                    "mode": section.experiment.mode,
                    "machine": str(section.experiment.machine or ""),
                    "missing": [list(each) for each in section.missing],
                    "series": [_series(each) for each in section.modelled],
                    "held_out": [each.to_dict() for each in section.held_out],
                }
                for section in self.sections
            ],
        }


def make_model_report(
    runs: Runs,
    communication: CommunicationFit | None = None,
    held_out: Collection[int] = (),
    *,
    draws: bool = True,
) -> ModelReport:
    """Returns the models of some runs.

    Args:
        runs: The runs.
        communication: The measured allreduce, if there is a measurement.
        held_out: The numbers of ranks whose runs are not used, but compared with the predictions.
        draws: Whether the figures are drawn.

    Raises:
        ModelError: No series has enough runs; says what each lacks.
    """
    allreduce_s = communication.allreduce_s if communication else None
    options = ModelOptions(allreduce_s, held_out=frozenset(held_out))
    sections: list[ModelSection] = []
    for experiment in group(runs.runs):
        if not experiment.runs:
            continue
        modelled, missing = model_experiment(experiment, options)
        slug = free_slug(experiment, {section.slug for section in sections})
        figures: list[Drawing] = []
        if draws and modelled:
            figures, not_drawn = draw_figures(experiment, slug, model_kinds(options))
            missing = (*missing, *not_drawn)
        times = held_out_times(modelled, options.held_out)
        tables = model_tables(modelled, slug)
        if times:
            tables.append(held_out_table(times, slug))
        notes = _notes(modelled, times)
        sections.append(
            ModelSection(experiment, slug, notes, modelled, times, missing, figures, tables)
        )
    if not any(section.modelled for section in sections):
        reasons = [f"{name}: {reason}" for each in sections for name, reason in each.missing]
        raise ModelError("; ".join(reasons) or "no run with valid times has finished")
    return ModelReport(_general_notes(communication), sections)


def write_model_report(report: ModelReport, directory: Path) -> Path:
    """Writes index.html, model.json, figures and tables; returns the path of the page.

    Raises:
        ParameterError: The directory cannot be created or written to.
    """
    figures = [figure for section in report.sections for figure in section.figures]
    tables = [table for section in report.sections for table in section.tables]
    contents = files_of(figures, tables)
    contents[JSON_NAME] = json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"
    contents[PAGE_NAME] = rendered("model_page.html", report=report, legend=LEGEND)
    return write_page(contents, directory)


def _general_notes(communication: CommunicationFit | None) -> list[str]:
    notes = [
        "Phases are the mean over ranks; they add up to the time of a run. Each is fitted by"
        " itself, with coefficients that cannot be negative, and of several laws the one that"
        " predicts held-out runs best is taken.",
        "A model of few sizes knows little: look at the extrapolation factor, and at the phases"
        " that are marked as badly fitted, before you believe a number.",
    ]
    if communication:
        notes.append(
            f"Measured: {communication}, with 95 % intervals. Of this time, the share that is"
            " exposed is fitted."
        )
    return notes


def _notes(modelled: Sequence[ModelledSeries], times: Sequence[HeldOutTime]) -> list[str]:
    if not modelled:
        return []
    notes = [fitted_words(modelled)]
    inside, num = runs_inside(times)
    if num:
        ranks = sorted({each.num_ranks for each in times})
        notes.append(
            f"Held out were {count(num, 'run')} on {listed(ranks)} ranks; of these,"
            f" {inside} {'is' if inside == 1 else 'are'} in the 90 % prediction intervals."
        )
    for each in modelled:
        bad = [fit.name for fit in badly_fitted(each.model)]
        if bad:
            notes.append(f"{each.name}: badly fitted are {listed(bad)}.")
    if not any(each.model.powers for each in modelled):
        notes.append("Power was not measured in all runs of a series, so no energy is predicted.")
    kinds = {o.energy_kind for each in modelled for o in each.model.observations} - {"", "measured"}
    if kinds:
        notes.append(f"The power of some runs is {listed(sorted(kinds))}.")
    return notes


def _series(each: ModelledSeries) -> dict[str, Any]:
    model = each.model
    return {
        "series": each.name,
        "runs": len(model.observations),
        "ranks": model.rank_counts,
        "degrees_of_freedom": model.degrees,
        "form_error_per_doubling": model.form_error,
        "extrapolation_errors": list(model.extrapolation_errors),
        "parameters": [_parameter(parameter) for parameter in model.parameters],
        "phases": _phases(model),
    }


def _parameter(each: FittedParameter) -> dict[str, Any]:
    numbers = {name: v if isfinite(v) else None for name, v in each.value.to_dict().items()}
    return {
        "phase": each.phase,
        "name": each.name,
        "unit": each.unit,
        **numbers,
        "confidence": each.value.confidence,
        "free": each.is_free,
        "runs": each.num_runs,
    }


def _phases(model: RunModel) -> list[dict[str, Any]]:
    return [
        {
            "phase": fit.name,
            "terms": [term.name for term in fit.chosen],
            "cannot_be_told_from": [[term.name for term in each] for each in fit.rivals],
            "held_out_error": fit.held_out,
            "residuals": [float(each) for each in fit.residuals],
        }
        for fit in model.phases
    ]
