"""Tables of models: parameters, fits, what was measured beside what is predicted, and what if."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from candle_p1.modelling.changes import usual_changes
from candle_p1.modelling.forecast import what_if
from candle_p1.modelling.model import BAD_FIT
from candle_p1.modelling.samples import ValueInterval
from candle_p1.reports.modelled import BEYOND, badly_fitted, fitted_words
from candle_p1.reports.quantities import TOTAL
from candle_p1.reports.table import ReportTable
from candle_p1.reports.words import listed, percent
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.modelling.changes import Changes
    from candle_p1.modelling.forecast import Forecast, ForecastPoint, ForecastSource
    from candle_p1.modelling.model import RunModel
    from candle_p1.modelling.phase_fit import PhaseFit
    from candle_p1.reports.modelled import ModelledSeries
    from candle_p1.reports.table import Cell

ALL_POWER = "power of the whole run"
SPAN = "Low and high are the ends of the span of all readings, which has no probability."
INTERVAL = "Low and high are the ends of 90 % prediction intervals for single runs."


def model_tables(modelled: Sequence[ModelledSeries], prefix: str) -> list[ReportTable]:
    """Returns the tables of the models of an experiment; none without models."""
    if not modelled:
        return []
    return [
        sizes_table(modelled, prefix),
        what_if_table(modelled, prefix),
        parameters_table(modelled, prefix),
        fits_table(modelled, prefix),
    ]


def sizes_table(modelled: Sequence[ModelledSeries], prefix: str) -> ReportTable:
    """Returns the medians that were measured, beside what the model says."""
    rows: list[tuple[Cell, ...]] = []
    for each in modelled:
        source = each.source()
        for num in each.counts():
            point, found = each.series.at(num), source.samples(num)
            interval = ValueInterval.of(found.total_s)
            measured = point.estimate(TOTAL.of) if point else None
            rows.append(
                (
                    each.name,
                    num,
                    measured.value if measured else None,
                    len(point.values(TOTAL.of)) if point else None,
                    interval.value,
                    interval.low,
                    interval.high,
                    100 * (interval.value / measured.value - 1) if measured else None,
                    found.extrapolation,
                    "held out" if point and num not in each.model.rank_counts else "",
                )
            )
    return ReportTable(
        f"{prefix}-model-sizes",
        "Model: measured and predicted total time",
        (
            "series", "ranks", "measured (s)", "runs", "model (s)", "low (s)", "high (s)",
            "model is off by (%)", "extrapolation factor", "note",
        ),
        tuple(rows),
        (INTERVAL, fitted_words(modelled)),
    ).without_empty_columns()  # fmt: skip


def what_if_table(modelled: Sequence[ModelledSeries], prefix: str) -> ReportTable:
    """Returns predictions with a faster file system or network, and with more epochs."""
    rows: list[tuple[Cell, ...]] = []
    for each in modelled:
        measured = each.series.timed[-1].num_ranks
        ranks = [num for num in each.counts() if num in (measured, BEYOND * measured)]
        changes = usual_changes(each.rule.at(measured).epochs)

        def sources(changed: Changes, each: ModelledSeries = each) -> dict[str, ForecastSource]:
            return {each.name: each.source(changed)}

        rows += [
            (each.name, name, *_forecast_cells(point))
            for name, point in what_if(sources, changes, ranks)
        ]
    notes = (
        INTERVAL,
        "Of loaders that read while they parse, nobody knows which share of loading is reading;"
        " with another file system, any share from 0 to 1 is taken to be as likely.",
        fitted_words(modelled),
    )
    headings = ("series", "what if", *_forecast_headings())
    table = ReportTable(f"{prefix}-what-if", "Model: what if", headings, tuple(rows), notes)
    return table.without_empty_columns()


def _forecast_headings() -> tuple[str, ...]:
    return (
        "ranks", "time (s)", "low (s)", "high (s)", "energy (J)", "low (J)", "high (J)",
        "scaling efficiency", "low", "high", "extrapolation factor",
    )  # fmt: skip


def _forecast_cells(point: ForecastPoint) -> tuple[Cell, ...]:
    return (
        point.num_ranks,
        *_ends(point.time_s),
        *_ends(point.energy_j),
        *_ends(point.efficiency),
        point.extrapolation,
    )


def _ends(interval: ValueInterval | None) -> tuple[Cell, Cell, Cell]:
    if interval is None:
        return None, None, None
    return interval.value, interval.low, interval.high


def parameters_table(modelled: Sequence[ModelledSeries], prefix: str) -> ReportTable:
    """Returns all coefficients with their intervals."""
    rows: list[tuple[Cell, ...]] = []
    for name, model in _models(modelled):
        for each in model.parameters:
            interval = each.value
            if not isfinite(interval.value):
                continue  # an infinite rate: the term takes no time
            high = interval.high if isfinite(interval.high) else None
            rows.append(
                (
                    name,
                    each.phase or ALL_POWER,
                    each.name + (" (free term)" if each.is_free else ""),
                    interval.value,
                    interval.low,
                    high,
                    each.unit,
                    each.num_runs,
                )
            )
    notes = (
        "Low and high are the ends of 95 % intervals, from a bootstrap over runs. A rate without a"
        " high end may be infinite, that is, its term may take no time. A free term has no law"
        " behind it, so it says nothing about other sizes.",
        fitted_words(modelled),
    )
    headings = ("series", "phase", "parameter", "value", "low", "high", "unit", "runs")
    return ReportTable(
        f"{prefix}-model-parameters", "Model: parameters", headings, tuple(rows), notes
    )


def fits_table(modelled: Sequence[ModelledSeries], prefix: str) -> ReportTable:
    """Returns for each phase by how much held-out runs are missed."""
    rows: list[tuple[Cell, ...]] = []
    notes = []
    for name, model in _models(modelled):
        for fit in model.phases:
            missed = None if fit.held_out is None else 100 * fit.held_out
            largest = 100 * max(map(abs, fit.residuals))
            rows.append((name, fit.name, len(fit.chosen), missed, float(largest), _remark(fit)))
        bad = badly_fitted(model)
        if bad:
            notes.append(
                f"{name}: held-out runs are missed by more than {percent(BAD_FIT)} in"
                f" {listed([fit.name for fit in bad])}."
            )
    notes.append(
        "Relative to the mean time of the phase, or 0.5 % of the total time if that is longer."
        " All runs of a size are held out at a time where three sizes or more were measured, else"
        " one run."
    )
    headings = (
        "series", "phase", "terms", "held-out runs missed by (%)", "largest residual (%)", "remark",
    )  # fmt: skip
    return ReportTable(
        f"{prefix}-model-fits",
        "Model: how well phases are fitted",
        headings,
        tuple(rows),
        (*notes, fitted_words(modelled)),
    ).without_empty_columns()


def _remark(fit: PhaseFit) -> str:
    words = []
    if any(term.is_free for term in fit.chosen):
        words.append("no law fits, so this has a free term")
    if fit.held_out is not None and fit.held_out > BAD_FIT:
        words.append("bad fit")
    if fit.rivals:
        names = [" and ".join(term.name for term in each) for each in fit.rivals]
        words.append(f"these runs cannot tell it from: {'; '.join(names)}")
    return ", ".join(words)


def _models(modelled: Sequence[ModelledSeries]) -> list[tuple[str, RunModel]]:
    """Returns every model once, with the names of its series."""
    names: dict[int, list[str]] = {}
    models = {id(each.model): each.model for each in modelled}
    for each in modelled:
        names.setdefault(id(each.model), []).append(each.name)
    return [("; ".join(names[key]), model) for key, model in models.items()]


def forecast_table(found: Forecast, slug: str, title: str, notes: Sequence[str]) -> ReportTable:
    """Returns what is predicted at some numbers of ranks."""
    rows: list[tuple[Cell, ...]] = [
        (
            point.series,
            *_forecast_cells(point),
            *_ends(point.gain),
            *_ends(point.energy_gain),
            _point_remark(point),
        )
        for point in found.points
    ]
    headings = (
        "series", *_forecast_headings(), "gain (%)", "gain, low", "gain, high", "energy gain (%)",
        "energy gain, low", "energy gain, high", "note",
    )  # fmt: skip
    kind = SPAN if found.confidence is None else INTERVAL
    return ReportTable(slug, title, headings, tuple(rows), (kind, *notes)).without_empty_columns()


def best_table(found: Forecast, slug: str) -> ReportTable:
    """Returns the best numbers of ranks."""
    rows: list[tuple[Cell, ...]] = [
        (
            each.series,
            *_counts(each.efficient),
            *_counts(each.least_energy),
            *_counts(each.least_energy_delay),
        )
        for each in found.best
    ]
    most = max(each.searched[-1] for each in found.best)
    title = f"The best scale, of up to {count(most, 'rank')}"
    headings = (
        "series", "most ranks with a scaling efficiency of 70 %", "low", "high",
        "ranks of least energy", "energy, low", "energy, high",
        "ranks of least energy times time", "product, low", "product, high",
    )  # fmt: skip
    return ReportTable(slug, title, headings, tuple(rows)).without_empty_columns()


def _counts(interval: ValueInterval | None) -> tuple[Cell, Cell, Cell]:
    """Returns numbers of ranks as such."""
    if interval is None:
        return None, None, None
    return int(interval.value), int(interval.low), int(interval.high)


def _point_remark(point: ForecastPoint) -> str:
    words = []
    if not point.can_run:
        words.append("the ranks cannot have equal shares of the epochs; rounded up")
    if point.extrapolation > 1:
        words.append("not measured")
    return ", ".join(words)
