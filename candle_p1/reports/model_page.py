"""The models of experiments as sections of a page: figures, tables and JSON.

``candle-p1 model`` shows all of it, a report the figures and the what-if table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from candle_p1.errors import ModelError
from candle_p1.modelling.communication import CommunicationFit
from candle_p1.modelling.fit import BAD_FIT, PARAMETER_CONFIDENCE, PhaseFit
from candle_p1.modelling.forecast import Changes, forecast
from candle_p1.modelling.laws import PHASES, JobShape
from candle_p1.modelling.model import RunModel
from candle_p1.modelling.samples import Interval, interval_of
from candle_p1.reports.experiments import Experiment, group
from candle_p1.reports.figures.model import draw_models
from candle_p1.reports.frame import Run
from candle_p1.reports.modelled import BEYOND, ModelledSeries, fitted_words, model_experiment
from candle_p1.reports.render import ReportTable, Section
from candle_p1.reports.sections import free_slug
from candle_p1.reports.words import listed, percent
from candle_p1.text import count

Row = tuple[Any, ...]

INTERVAL = "Low and high are the ends of 90 % prediction intervals for single runs."
WHOLE_RUN = "whole run"
NOTES = (
    "Phases are the mean over ranks; they add up to the time of a run. Each is fitted by itself,"
    " with coefficients that cannot be negative, and of several laws the one that predicts held-out"
    " runs best is taken.",
    "A model of few sizes knows little: look at the extrapolation factor, and at the phases that"
    " are marked as badly fitted, before you believe a number.",
)


def model_section(experiment: Experiment, slug: str) -> Section | None:
    """Returns what a report shows of the models of an experiment; None if there is none.

    Args:
        experiment: The runs.
        slug: The beginning of the names of its files.
    """
    modelled, missing = model_experiment(experiment)
    if not modelled:
        return None
    figures, not_drawn = draw_models(modelled, slug)
    tables = [what_if_table(modelled, slug)]
    missing += not_drawn
    return Section(f"{slug}-model", "Model", figures=figures, missing=missing, tables=tables)


@dataclass(frozen=True)
class ModelReport:
    """The models of some runs.

    Attributes:
        notes: On all of them together.
        sections: One for each experiment.
        content: All models as JSON.
        num_models: The number of series that have one.
    """

    notes: Sequence[str]
    sections: Sequence[Section]
    content: dict[str, Any]
    num_models: int


def make_model_report(
    runs: Sequence[Run],
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
    notes = list(NOTES)
    allreduce_s: Callable[[JobShape], float] | None = None
    if communication:
        allreduce_s = communication.allreduce_s
        notes.append(
            f"Measured: {communication}, with 95 % intervals. Of this time, the share that is"
            " exposed is fitted."
        )
    sections: list[Section] = []
    content, num_models = [], 0
    for experiment in group(runs):
        if experiment.runs.empty:
            continue
        modelled, missing = model_experiment(experiment, allreduce_s, held_out=held_out)
        num_models += len(modelled)
        slug = free_slug(experiment, {each.slug for each in sections})
        times = [time for each in modelled for time in _held_out_times(each, held_out)]
        figures, not_drawn = draw_models(modelled, slug) if draws and modelled else ([], [])
        tables = list(_tables(modelled, times, slug)) if modelled else []
        sections.append(
            Section(
                slug,
                experiment.title,
                [f"On {experiment.machine or 'an unknown machine'}."],
                list(_notes(modelled, times)) if modelled else [],
                figures=figures,
                missing=[*missing, *not_drawn],
                tables=tables,
            )
        )
        content.append(
            {
                "benchmark": experiment.benchmark,
                "mode": experiment.mode,
                "machine": str(experiment.machine or ""),
                "missing": [list(each) for each in missing],
                "series": [{"series": each.name} | _as_json(each.model) for each in modelled],
                "held_out": times,
            }
        )
    if not num_models:
        reasons = [f"{name}: {reason}" for each in content for name, reason in each["missing"]]
        raise ModelError("; ".join(reasons) or "no run with valid times has finished")
    return ModelReport(notes, sections, {"notes": notes, "sections": content}, num_models)


def _as_json(model: RunModel) -> dict[str, Any]:
    return {
        "runs": len(model.observations),
        "ranks": model.rank_counts,
        "degrees_of_freedom": model.degrees,
        "form_error_per_doubling": model.form_error,
        "extrapolation_errors": list(model.extrapolation_errors),
        "parameters": [
            {
                name: None if isinstance(value, float) and not isfinite(value) else value
                for name, value in each._asdict().items()
            }
            | {"confidence": PARAMETER_CONFIDENCE}
            for each in model.parameters
        ],
        "phases": [
            {
                "phase": fit.name,
                "terms": [term.name for term in fit.chosen],
                "cannot_be_told_from": [[term.name for term in each] for each in fit.rivals],
                "held_out_error": fit.held_out,
                "residuals": fit.residuals.tolist(),
            }
            for fit in model.phases
        ],
    }


def _held_out_times(each: ModelledSeries, held_out: Collection[int]) -> Iterator[dict[str, Any]]:
    """Yields the whole time and the phases of the runs that were held out, beside predictions."""
    for num_ranks, runs in each.runs.items():
        if num_ranks not in held_out:
            continue
        predicted = each.source().samples(num_ranks)
        times = {WHOLE_RUN: ([run.total_s for run in runs], predicted.total_s)}
        for phase in PHASES:
            measured_s = [run.phases_s[phase] for run in runs]
            if phase in predicted.phases_s:
                times[phase] = measured_s, predicted.phases_s[phase]
            elif any(measured_s):  # no run that the model was fitted to has the phase
                times[phase] = measured_s, np.zeros(1)
        for phase, (measured_s, samples) in times.items():
            found = interval_of(samples)
            yield {
                "series": each.name,
                "ranks": num_ranks,
                "phase": phase,
                "measured_s": measured_s,
                "predicted_s": found,
                "inside": sum(found["low"] <= value <= found["high"] for value in measured_s),
            }


def _notes(modelled: Sequence[ModelledSeries], times: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield fitted_words(modelled)
    whole = [each for each in times if each["phase"] == WHOLE_RUN]
    if whole:
        inside, num = (
            sum(each["inside"] for each in whole),
            sum(len(e["measured_s"]) for e in whole),
        )
        ranks = sorted({each["ranks"] for each in whole})
        yield (
            f"Held out were {count(num, 'run')} on {listed(ranks)} ranks; of these,"
            f" {inside} {'is' if inside == 1 else 'are'} in the 90 % prediction intervals."
        )
    for each in modelled:
        bad = [fit.name for fit in each.model.phases if fit.is_bad]
        if bad:
            yield f"{each.name}: badly fitted are {listed(bad)}."
    if not any(each.model.powers for each in modelled):
        yield "Power was not measured in all runs of a series, so no energy is predicted."
    kinds = {run.energy_kind for each in modelled for run in each.model.observations}
    if kinds - {"", "measured"}:
        yield f"The power of some runs is {listed(sorted(kinds - {'', 'measured'}))}."


def _tables(
    modelled: Sequence[ModelledSeries], times: Sequence[dict[str, Any]], slug: str
) -> Iterator[ReportTable]:
    yield _sizes_table(modelled, slug)
    yield what_if_table(modelled, slug)
    yield _parameters_table(modelled, slug)
    yield _fits_table(modelled, slug)
    if times:
        yield _held_out_table(times, slug)


def _sizes_table(modelled: Sequence[ModelledSeries], slug: str) -> ReportTable:
    rows: list[Row] = []
    for each in modelled:
        source = each.source()
        for num in each.counts():
            found = source.samples(num)
            interval = interval_of(found.total_s)
            runs = each.runs.get(num)
            measured_s = median(run.total_s for run in runs) if runs else None
            off = 100 * (interval["value"] / measured_s - 1) if measured_s else None
            note = "held out" if runs and num not in each.model.rank_counts else ""
            measured = (each.name, num, measured_s, len(runs) if runs else None)
            rows.append((*measured, *ends(interval), off, found.extrapolation, note))
    headings = (
        "series", "ranks", "measured (s)", "runs", "model (s)", "low (s)", "high (s)",
        "model is off by (%)", "extrapolation factor", "note",
    )  # fmt: skip
    title = "Model: measured and predicted total time"
    return _table(f"{slug}-model-sizes", title, headings, rows, INTERVAL, fitted_words(modelled))


FORECAST_HEADINGS = (
    "ranks", "time (s)", "low (s)", "high (s)", "energy (J)", "low (J)", "high (J)",
    "scaling efficiency", "low", "high", "extrapolation factor",
)  # fmt: skip


def forecast_cells(point: dict[str, Any]) -> Row:
    """Returns the cells of a forecast beneath FORECAST_HEADINGS."""
    intervals = [ends(point[name]) for name in ("time_s", "energy_j", "efficiency")]
    return (point["ranks"], *(end for each in intervals for end in each), point["extrapolation"])


def ends(interval: Interval | None) -> Row:
    """Returns the cells of an interval."""
    return tuple(interval.values()) if interval else (None,) * 3


def what_if_table(modelled: Sequence[ModelledSeries], slug: str) -> ReportTable:
    """Returns predictions with a faster file system or network, and with more epochs."""
    rows: list[Row] = []
    for each in modelled:
        measured = max(each.runs)
        ranks = [num for num in each.counts() if num in (measured, BEYOND * measured)]
        twice = 2 * each.rule.at(measured).epochs
        changes = {
            "as it is": Changes(),
            "file system twice as fast": Changes(file_system=2),
            "network twice as fast": Changes(network=2),
            f"{count(twice, 'epoch')} per rank": Changes(epochs_per_rank=twice),
        }
        rows += [
            (each.name, name, *forecast_cells(point))
            for name, changed in changes.items()
            for point in forecast({each.name: each.source(changed)}, ranks)
        ]
    headings = ("series", "what if", *FORECAST_HEADINGS)
    note = (
        "Of loaders that read while they parse, the share of loading that is reading is unknown:"
        " with another file system, it is sampled uniformly between 0 and 1."
    )
    notes = (INTERVAL, note, fitted_words(modelled))
    return _table(f"{slug}-what-if", "Model: what if", headings, rows, *notes)


def _parameters_table(modelled: Sequence[ModelledSeries], slug: str) -> ReportTable:
    rows: list[Row] = [
        (
            name,
            each.phase or "power of the whole run",
            each.name,
            each.value,
            each.low,
            each.high if isfinite(each.high) else None,
            each.unit,
            each.runs,
        )
        for name, model in _models(modelled)
        for each in model.parameters
        if isfinite(each.value)  # an infinite rate: the term takes no time
    ]
    note = (
        "Low and high are the ends of 95 % intervals, from a bootstrap over runs. A rate without a"
        " high end may be infinite, that is, its term may take no time."
    )
    headings = ("series", "phase", "parameter", "value", "low", "high", "unit", "runs")
    slug = f"{slug}-model-parameters"
    return _table(slug, "Model: parameters", headings, rows, note, fitted_words(modelled))


def _fits_table(modelled: Sequence[ModelledSeries], slug: str) -> ReportTable:
    rows: list[Row] = []
    notes = []
    for name, model in _models(modelled):
        for fit in model.phases:
            missed = None if fit.held_out is None else 100 * fit.held_out
            largest = 100 * float(np.abs(fit.residuals).max())
            rows.append((name, fit.name, len(fit.chosen), missed, largest, _remark(fit)))
        bad = [fit.name for fit in model.phases if fit.is_bad]
        if bad:
            missed_by = f"held-out runs are missed by more than {percent(BAD_FIT)}"
            notes.append(f"{name}: {missed_by} in {listed(bad)}.")
    notes.append(
        "Relative to the mean time of the phase, or 0.5 % of the total time if that is longer."
        " All runs of a size are held out at a time where three sizes or more were measured, else"
        " one run."
    )
    headings = (
        "series", "phase", "terms", "held-out runs missed by (%)", "largest residual (%)", "remark",
    )  # fmt: skip
    title = "Model: how well phases are fitted"
    return _table(f"{slug}-model-fits", title, headings, rows, *notes, fitted_words(modelled))


def _remark(fit: PhaseFit) -> str:
    words = ["bad fit"] if fit.is_bad else []
    if fit.rivals:
        names = [" and ".join(term.name for term in each) for each in fit.rivals]
        words.append(f"these runs cannot tell it from: {'; '.join(names)}")
    return ", ".join(words)


def _models(modelled: Sequence[ModelledSeries]) -> list[tuple[str, RunModel]]:
    """Returns every model once, with the names of its series."""
    models = {id(each.model): each.model for each in modelled}
    return [
        ("; ".join(each.name for each in modelled if each.model is model), model)
        for model in models.values()
    ]


def _held_out_table(times: Sequence[dict[str, Any]], slug: str) -> ReportTable:
    rows: list[Row] = []
    for each in times:
        measured_s, found = median(each["measured_s"]), each["predicted_s"]
        runs = len(each["measured_s"]), each["inside"]
        known = (each["series"], each["ranks"], each["phase"], measured_s, *runs)
        rows.append((*known, *found.values(), found["value"] - measured_s))
    headings = (
        "series", "ranks", "phase", "measured (s)", "runs", "of these, in the interval",
        "predicted (s)", "low (s)", "high (s)", "predicted less measured (s)",
    )  # fmt: skip
    note = (
        "The models were not fitted to these runs. Measured is their median. Low and high are the"
        " ends of 90 % prediction intervals for single runs; those of phases do not add up to that"
        " of the whole run."
    )
    slug = f"{slug}-model-held-out"
    return _table(slug, "Model: runs that were held out", headings, rows, note)


def _table(
    slug: str, title: str, headings: Sequence[str], rows: Sequence[Row], *notes: str
) -> ReportTable:
    return ReportTable(slug, title, headings, rows, notes).without_empty_columns()
