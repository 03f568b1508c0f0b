"""Predictions for ``candle-p1 predict``: from records of runs, or from what the paper prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ModelError
from candle_p1.modelling.changes import Changes
from candle_p1.modelling.forecast import PaperSource, forecast
from candle_p1.reports.model_tables import best_table, forecast_table
from candle_p1.reports.modelled import ModelOptions, badly_fitted, fitted_words, model_experiment
from candle_p1.reports.paper_inputs import (
    MACHINE,
    MISSING,
    PrintedGain,
    gains_beside,
    gains_to_check,
    inputs_used,
    paper_inputs,
)
from candle_p1.reports.points import MODES, STRONG, WEAK, group
from candle_p1.reports.published import METHOD_LOADER, ORIGINAL_LOADER
from candle_p1.reports.table import ReportTable
from candle_p1.reports.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.modelling.forecast import Forecast, ForecastSource
    from candle_p1.modelling.samples import ValueInterval
    from candle_p1.modelling.shape import JobShape
    from candle_p1.reports.modelled import ModelledSeries
    from candle_p1.reports.points import Experiment
    from candle_p1.reports.published import Published
    from candle_p1.reports.runs import Runs


@dataclass(frozen=True)
class Prediction:
    """What is predicted for one benchmark and mode of scaling.

    Attributes:
        title: Benchmark, mode and machine.
        changes: What is changed.
        found: The forecast.
        unchanged: The forecast without the changes; None where nothing is changed.
        notes: From what it is made, and what it cannot know.
        published: The gains that the paper prints.
        checks: Those that the prediction is not made from, each with what is predicted.
    """

    title: str
    changes: Changes
    found: Forecast
    unchanged: Forecast | None
    notes: Sequence[str]
    published: Sequence[Published]
    checks: Sequence[tuple[PrintedGain, ValueInterval]] = ()

    def tables(self) -> list[ReportTable]:
        """Returns the forecasts, and the best numbers of ranks."""
        tables = []
        if self.unchanged:
            tables.append(forecast_table(self.unchanged, "as-it-is", f"{self.title}, as it is", ()))
        title = f"{self.title}, {self.changes}" if self.unchanged else self.title
        tables.append(forecast_table(self.found, "predicted", title, ()))
        tables.append(best_table(self.found, "best"))
        return [*tables, *([self._checks_table()] if self.checks else [])]

    def _checks_table(self) -> ReportTable:
        rows = tuple(
            (
                printed.num_ranks,
                f"{printed.percent:.2f}",
                gain.value,
                gain.low,
                gain.high,
                gain.value - printed.percent,
                printed.note,
            )
            for printed, gain in self.checks
        )
        headings = (
            "ranks", "printed (%)", "predicted (%)", "low (%)", "high (%)", "difference (points)",
            "note",
        )  # fmt: skip
        title = "The gain in time that the paper prints, and what follows from its other numbers"
        return ReportTable("checks", title, headings, rows).without_empty_columns()

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON."""
        return {
            "title": self.title,
            "changes": str(self.changes),
            "confidence": self.found.confidence,
            "gains_relative_to": self.found.base,
            "points": [point.to_dict() for point in self.found.points],
            "best": [each.to_dict() for each in self.found.best],
            "as_it_is": [p.to_dict() for p in self.unchanged.points] if self.unchanged else None,
            "notes": list(self.notes),
            "published": [str(each) for each in self.published],
            "checks": [
                {"ranks": printed.num_ranks, "printed_percent": printed.percent}
                | {"predicted_percent": gain.to_dict(), "note": printed.note}
                for printed, gain in self.checks
            ],
        }


def predict_paper(
    benchmark: str, modes: Sequence[str], ranks: Sequence[int], changes: Changes
) -> list[Prediction]:
    """Returns predictions of the paper's runs on Summit, from what the paper prints.

    Args:
        benchmark: Its name.
        modes: strong, weak, or both.
        ranks: The numbers of ranks.
        changes: What is changed.

    Raises:
        ModelError: The paper prints too little.
        ParameterError: It prints nothing about what is changed.
    """
    inputs = paper_inputs(benchmark)

    def sources(mode: str, changed: Changes) -> dict[str, ForecastSource]:
        return {
            f"loader {loader}": PaperSource(inputs, mode, loader, changed)
            for loader in (ORIGINAL_LOADER, METHOD_LOADER)
        }

    base = f"loader {ORIGINAL_LOADER}"
    predictions = []
    for mode in modes:
        found = forecast(sources(mode, changes), ranks, base)
        plain = forecast(sources(mode, Changes()), ranks, base) if changes != Changes() else None
        title = f"{benchmark.upper()} on {MACHINE}, {MODES[mode]}, from published values"
        notes = [
            "Nothing here was measured: it follows from numbers that the paper prints, which are"
            " listed below. Low and high are the ends of the span of all ways to read them.",
            *(f"not printed: {each}" for each in MISSING[benchmark]),
            *(f"used: {each}" for each in inputs_used(benchmark)),
        ]
        checks = []
        for printed in gains_to_check(benchmark, mode):
            (point,) = forecast(sources(mode, Changes()), [printed.num_ranks], base).points[1:]
            assert point.gain is not None
            checks.append((printed, point.gain))
        published = gains_beside(benchmark, mode)
        predictions.append(Prediction(title, changes, found, plain, notes, published, checks))
    return predictions


def predict_runs(
    runs: Runs,
    benchmark: str,
    modes: Sequence[str],
    ranks: Sequence[int],
    changes: Changes,
    ranks_per_node: int | None = None,
    allreduce_s: Callable[[JobShape], float] | None = None,
) -> list[Prediction]:
    """Returns predictions from records.

    Args:
        runs: The runs.
        benchmark: Its name.
        modes: strong, weak, batch, or some of them.
        ranks: The numbers of ranks.
        changes: What is changed.
        ranks_per_node: The ranks that fill a node; None if it is that of the runs.
        allreduce_s: Returns the measured time of averaging the gradients of a step once, in s.

    Raises:
        ModelError: There are no runs of the benchmark, or too few.
    """
    experiments = [
        each for each in group(runs.runs) if each.benchmark == benchmark and each.mode in modes
    ]
    predictions, reasons = [], []
    for experiment in experiments:
        modelled, missing = model_experiment(experiment, ModelOptions(allreduce_s, ranks_per_node))
        lacking = [f"{name}: {reason}" for name, reason in missing]
        reasons += lacking
        if modelled:
            predictions.append(_predict(experiment, modelled, ranks, changes, lacking))
    if not predictions:
        known = sorted({run.benchmark for run in runs.runs if run.is_timed})
        raise ModelError(
            "; ".join(reasons)
            or f"--from: there is no finished run of {benchmark} with {listed(list(modes))}"
            f" scaling; there are runs of {listed(known) or 'no benchmark'}"
        )
    return predictions


def _predict(
    experiment: Experiment,
    modelled: Sequence[ModelledSeries],
    ranks: Sequence[int],
    changes: Changes,
    lacking: Sequence[str],
) -> Prediction:
    base = next(
        (each.name for each in modelled if each.series.settings.get("loader") == ORIGINAL_LOADER),
        modelled[0].name if len(modelled) > 1 else "",
    )
    found = forecast({each.name: each.source(changes) for each in modelled}, ranks, base)
    plain = None
    if changes != Changes():
        plain = forecast({each.name: each.source() for each in modelled}, ranks, base)
    title = f"{experiment.benchmark.upper()}, {MODES[experiment.mode]}, on {experiment.machine}"
    notes = [fitted_words(modelled), *lacking]
    for each in modelled:
        notes += [
            f"{each.name}: {fit.name} is badly fitted; held-out runs are missed by"
            f" {100 * (fit.held_out or 0):.0f} %"
            for fit in badly_fitted(each.model)
        ]
    return Prediction(title, changes, found, plain, notes, ())


PAPER_MODES = (STRONG, WEAK)
"""The modes of which the paper prints enough for a model."""
