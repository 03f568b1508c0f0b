"""The models of experiments: sections of a page with figures and tables, and JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from candle_p1.errors import ModelError
from candle_p1.modelling.communication import CommunicationFit
from candle_p1.modelling.fit import BAD_FIT, PhaseFit
from candle_p1.modelling.forecast import Changes, forecast
from candle_p1.modelling.laws import PHASES
from candle_p1.modelling.model import RunModel
from candle_p1.modelling.samples import interval_of
from candle_p1.reports.experiments import Experiment, group
from candle_p1.reports.figures.model import draw_models
from candle_p1.reports.frame import Run
from candle_p1.reports.modelled import (
    BEYOND,
    ModelledSeries,
    fitted_words,
    model_experiment,
)
from candle_p1.reports.render import ReportTable, Section
from candle_p1.reports.sections import free_slug
from candle_p1.reports.words import listed, percent
from candle_p1.text import count

Row = dict[str, Any]
"""An entry of a list in JSON, and a row of a table: numbers, words and intervals by name."""

INTERVAL = "Low and high are the ends of 90 % prediction intervals for single runs."
WHOLE_RUN = "whole run"
LEAD = (
    "Times and energies that are predicted from records of runs. What was measured is called so;"
    " everything else is a prediction."
)
NOTES = (
    "Phases are the mean over ranks; they add up to the time of a run. Each is fitted by itself,"
    " with coefficients that cannot be negative, and of several laws the one that predicts held-out"
    " runs best is taken.",
    "A model of few sizes knows little: look at the extrapolation, and at the phases that"
    " are marked as badly fitted, before you believe a number.",
)


def model_page(
    runs: Sequence[Run],
    communication: CommunicationFit | None = None,
    held_out: Collection[int] = (),
    *,
    draws: bool = True,
) -> tuple[Section, dict[str, Any]]:
    """Returns the models of some runs, as a page and as JSON.

    Runs on the numbers of ranks that are held out are not used, but compared with the predictions.

    Raises:
        ModelError: No series has enough runs; says what each lacks.
    """
    sections: list[Section] = []
    notes, content = list(NOTES), []
    if communication:
        notes.append(
            f"Measured: {communication}, with 95 % intervals. Of this time, the share that is"
            " exposed is fitted."
        )
    allreduce_s = communication.allreduce_s if communication else None
    for experiment in group(runs):
        if experiment.runs.empty:
            continue
        modelled, missing = model_experiment(experiment, allreduce_s, held_out=held_out)
        slug = free_slug(experiment, {each.slug for each in sections})
        times = [time for each in modelled for time in _held_out_times(each, held_out)]
        section = Section(slug, experiment.title, [experiment.where], missing=missing)
        if modelled:
            section = _filled(section, slug, modelled, times, draws=draws)
        sections.append(section)
        content.append(
            {
                "benchmark": experiment.benchmark,
                "mode": experiment.mode,
                "machine": str(experiment.machine or ""),
                "missing": missing,
                "series": [{"series": each.name} | _as_json(each.model) for each in modelled],
                "held_out": times,
            }
        )
    if not any(each["series"] for each in content):
        reasons = [f"{name}: {reason}" for each in content for name, reason in each["missing"]]
        raise ModelError("; ".join(reasons) or "no run with valid times has finished")
    page = Section("", "CANDLE Pilot1: model", [LEAD], notes, sections=sections)
    return page, {"notes": notes, "sections": content}


def model_section(experiment: Experiment, slug: str) -> Section | None:
    """Returns what a report shows of the models of an experiment; None if there is none."""
    modelled, missing = model_experiment(experiment)
    section = Section("", "Model", missing=missing)
    return _filled(section, slug, modelled) if modelled else None


def _filled(
    section: Section,
    slug: str,
    modelled: Sequence[ModelledSeries],
    times: Sequence[Row] = (),
    *,
    draws: bool = True,
) -> Section:
    """Adds notes, figures and tables, whose names begin with the slug."""
    figures, not_drawn = draw_models(modelled, slug) if draws else ([], [])
    return replace(
        section,
        notes=list(_notes(modelled, times)),
        figures=figures,
        missing=[*section.missing, *not_drawn],
        tables=list(_tables(modelled, times, slug)),
    )


def _as_json(model: RunModel) -> dict[str, Any]:
    return {
        "runs": len(model.observations),
        "ranks": model.rank_counts,
        "degrees_of_freedom": model.degrees,
        "form_error_per_doubling": model.form_error,
        "extrapolation_errors": list(model.extrapolation_errors),
        "parameters": [
            {name: None if value == np.inf else value for name, value in each.items()}
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


def _held_out_times(each: ModelledSeries, held_out: Collection[int]) -> Iterator[Row]:
    for num_ranks in sorted(each.runs.keys() & held_out):
        runs, predicted = each.runs[num_ranks], each.source().samples(num_ranks)
        times = {WHOLE_RUN: ([run.total_s for run in runs], predicted.total_s)}
        for phase in PHASES:
            measured_s = [run.phases_s[phase] for run in runs]
            if phase in predicted.phases_s or any(measured_s):
                # Without samples, no run that the model was fitted to has the phase.
                times[phase] = measured_s, predicted.phases_s.get(phase, np.zeros(1))
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


def _notes(modelled: Sequence[ModelledSeries], times: Sequence[Row]) -> Iterator[str]:
    yield fitted_words(modelled)
    whole = [each for each in times if each["phase"] == WHOLE_RUN]
    if whole:
        num, inside = sum(len(e["measured_s"]) for e in whole), sum(e["inside"] for e in whole)
        yield (
            f"Held out were {count(num, 'run')} on {listed(sorted({e['ranks'] for e in whole}))}"
            f" ranks; of these, {inside} {'is' if inside == 1 else 'are'} in the 90 % prediction"
            " intervals."
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
    modelled: Sequence[ModelledSeries], times: Sequence[Row], slug: str
) -> Iterator[ReportTable]:
    fitted = fitted_words(modelled)
    names: dict[int, list[str]] = {}
    models = {id(each.model): each.model for each in modelled}
    for each in modelled:
        names.setdefault(id(each.model), []).append(each.name)
    fits = [
        ({"series": "; ".join(names[key])}, _as_json(model), model) for key, model in models.items()
    ]
    title = "Model: measured and predicted total time"
    rows = [row for each in modelled for row in _size_rows(each)]
    yield to_table(f"{slug}-model-sizes", title, rows, INTERVAL, fitted)
    note = (
        "Of loaders that read while they parse, the share of loading that is reading is unknown:"
        " with another file system, it is sampled uniformly between 0 and 1."
    )
    rows = [row for each in modelled for row in _what_if_rows(each)]
    yield to_table(f"{slug}-what-if", "Model: what if", rows, INTERVAL, note, fitted)
    note = (
        "Low and high are the ends of 95 % intervals, from a bootstrap over runs. A rate without a"
        " high end may be infinite, that is, its term may take no time. Of the whole run is a power"
        " without a phase."
    )
    rows = [
        name | each
        for name, found, _ in fits
        for each in found["parameters"]
        if each["value"] is not None
    ]
    yield to_table(f"{slug}-model-parameters", "Model: parameters", rows, note, fitted)
    note = (
        "Errors are relative to the mean time of the phase, or 0.5 % of the total time if that is"
        " longer. All runs of a size are held out at a time where three sizes or more were"
        f" measured, else one run. A fit is bad where these are missed by more than"
        f" {percent(BAD_FIT)}."
    )
    rows = [name | _fit_row(fit) for name, _, model in fits for fit in model.phases]
    title = "Model: how well phases are fitted"
    yield to_table(f"{slug}-model-fits", title, rows, note, fitted)
    if times:
        note = (
            "The models were not fitted to these runs. Measured is their median, and inside are"
            " those in the interval. Intervals of phases do not add up to that of the whole run."
        )
        rows = [
            each
            | {"runs": len(each["measured_s"])}
            | {"difference_s": each["predicted_s"]["value"] - median(each["measured_s"])}
            for each in times
        ]
        title = "Model: runs that were held out"
        yield to_table(f"{slug}-model-held-out", title, rows, INTERVAL, note)


def _size_rows(each: ModelledSeries) -> Iterator[Row]:
    for num in each.counts():
        found, runs = each.source().samples(num), each.runs.get(num, ())
        interval = interval_of(found.total_s)
        measured_s = median(run.total_s for run in runs) if runs else None
        yield {
            "series": each.name,
            "ranks": num,
            "measured_s": measured_s,
            "runs": len(runs) or None,
            "model_s": interval,
            "off_percent": 100 * (interval["value"] / measured_s - 1) if measured_s else None,
            "extrapolation": found.extrapolation,
            "note": "held out" if runs and num not in each.model.rank_counts else "",
        }


def _what_if_rows(each: ModelledSeries) -> Iterator[Row]:
    measured = max(each.runs)
    ranks = [num for num in each.counts() if num in (measured, BEYOND * measured)]
    epochs = 2 * each.rule.at(measured).epochs
    for name, changes in {
        "as it is": Changes(),
        "file system twice as fast": Changes(file_system=2),
        "network twice as fast": Changes(network=2),
        f"{count(epochs, 'epoch')} per rank": Changes(epochs_per_rank=epochs),
    }.items():
        for point in forecast({each.name: each.source(changes)}, ranks):
            yield {"series": each.name, "what_if": name} | point


def _fit_row(fit: PhaseFit) -> Row:
    rivals = [" and ".join(term.name for term in each) for each in fit.rivals]
    return {
        "phase": fit.name,
        "terms": len(fit.chosen),
        "held_out_error_percent": fit.held_out and 100 * fit.held_out,
        "largest_residual_percent": 100 * float(np.abs(fit.residuals).max()),
        "remark": "bad fit" if fit.is_bad else "",
        "cannot_be_told_from": "; ".join(rivals),
    }


UNITS = {"_s": " (s)", "_j": " (J)", "_percent": " (%)"}
ONLY_JSON = ("can_run", "shares", "confidence", "searched")


def to_table(slug: str, title: str, rows: Sequence[Row], *notes: str) -> ReportTable:
    """Returns a table of rows of JSON, whose headings are their keys, without empty columns.

    An interval has three columns; of a list, the median is shown.
    """
    intervals = {name for row in rows for name, cell in row.items() if isinstance(cell, dict)}
    headings: list[str] = []
    cells: list[list[Any]] = [[] for _ in rows]
    for name in [name for name in rows[0] if name not in ONLY_JSON]:
        end = next((end for end in UNITS if name.endswith(end)), "")
        heading = name.removesuffix(end).replace("_", " ") + UNITS.get(end, "")
        ends = ("", ", low", ", high") if name in intervals else ("",)
        headings += [f"{heading}{each}" for each in ends]
        for row, flat in zip(rows, cells, strict=True):
            cell = row[name]
            if isinstance(cell, list):
                cell = median(cell)
            flat += (cell.values() if cell else (None,) * 3) if name in intervals else [cell]
    return ReportTable(slug, title, headings, cells, notes).without_empty_columns()
