"""The models of experiments: sections of a page with figures and tables, and JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.errors import ModelError
from candle_p1.modelling.communication import CommunicationFit
from candle_p1.modelling.fit import BAD_FIT, PhaseFit
from candle_p1.modelling.forecast import Changes, ForecastSource, forecast, model_source
from candle_p1.modelling.laws import PHASES, JobShape
from candle_p1.modelling.model import FORM_ERROR, RunModel, fit_model
from candle_p1.modelling.observations import Observation, ShapeRule, observe
from candle_p1.modelling.samples import PREDICTION_CONFIDENCE, interval_of
from candle_p1.reports import drawing
from candle_p1.reports.drawing import COLORS, Drawing
from candle_p1.reports.experiments import Experiment, Series, describe, group
from candle_p1.reports.frame import Run
from candle_p1.reports.render import ReportTable, Section
from candle_p1.reports.statistics import contents, listed, percent
from candle_p1.text import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
"""An entry of a list in JSON, and a row of a table: numbers, words and intervals by name."""

WHOLE_RUN = "whole run"
MAX_SERIES, MAX_COLUMNS, TITLE_WIDTH = 6, 3, 44


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
    said, content = contents()["model"], []
    notes = list(said["notes"])
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
        times = [time for each in modelled for time in _held_out_times(each, held_out)]
        section = Section(experiment.slug, experiment.title, [experiment.where], missing=missing)
        if modelled:
            section = _filled(section, experiment.slug, modelled, times, draws=draws)
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
    page = Section("", said["title"], [said["lead"]], notes, sections=sections)
    return page, {"notes": notes, "sections": content}


def model_section(experiment: Experiment) -> Section | None:
    """Returns what a report shows of the models of an experiment; None if there is none."""
    modelled, missing = model_experiment(experiment)
    section = Section("", "Model", missing=missing)
    return _filled(section, experiment.slug, modelled) if modelled else None


def _filled(
    section: Section,
    slug: str,
    modelled: Sequence[ModelledSeries],
    times: Sequence[Row] = (),
    *,
    draws: bool = True,
) -> Section:
    """Adds notes, figures and tables, whose names begin with the slug."""
    figures, not_drawn = _figures(modelled, slug) if draws else ([], [])
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
    names: dict[int, list[str]] = {}
    models = {id(each.model): each.model for each in modelled}
    for each in modelled:
        names.setdefault(id(each.model), []).append(each.name)
    fits = [({"series": "; ".join(names[key])}, model) for key, model in models.items()]
    rows = {
        "model-sizes": [row for each in modelled for row in _size_rows(each)],
        "what-if": [row for each in modelled for row in _what_if_rows(each)],
        "model-parameters": [
            name | each
            for name, model in fits
            for each in _as_json(model)["parameters"]
            if each["value"] is not None
        ],
        "model-fits": [name | _fit_row(fit) for name, model in fits for fit in model.phases],
        "model-held-out": [
            each
            | {"runs": len(each["measured_s"])}
            | {"difference_s": each["predicted_s"]["value"] - median(each["measured_s"])}
            for each in times
        ],
    }
    for kind, of_kind in rows.items():
        if of_kind:
            yield to_table(kind, of_kind, prefix=f"{slug}-", bad=percent(BAD_FIT))


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


def _figures(modelled: Sequence[ModelledSeries], prefix: str) -> tuple[list[Drawing], Missing]:
    import matplotlib as mpl

    shown = [each for each in modelled if len(each.counts()) > 1]
    if not shown:
        return [], [("Figures", "all runs are on the same number of ranks")]
    parts = [shown[i : i + MAX_SERIES] for i in range(0, len(shown), MAX_SERIES)]
    with mpl.rc_context(drawing.LOOK):
        return [
            _draw(part, f"{prefix}-model" + f"-{i}" * (len(parts) > 1))
            for i, part in enumerate(parts, 1)
        ], []


def _draw(series: Sequence[ModelledSeries], slug: str) -> Drawing:
    figure, plots = drawing.new_figure(len(series), MAX_COLUMNS, sharey=True)
    bounds = [_draw_curve(axes, each) for axes, each in zip(plots, series, strict=True)]
    if max(high for _, high in bounds) > drawing.LOG_FROM * max(1e-9, min(b for b, _ in bounds)):
        for axes in plots:
            drawing.log_axis(axes)
    else:
        plots[0].set_ylim(bottom=0)
    for axes, each in zip(plots, series, strict=True):
        drawing.count_axis(axes, each.counts(), "ranks")
        axes.set_title(fill(each.name, TITLE_WIDTH), fontsize=9)
    for axes in plots[::MAX_COLUMNS]:
        axes.set_ylabel("total time (s)")
    drawing.legend_below(figure, *plots)
    said = contents()["curve"]
    caption = said["caption"].format(fitted=fitted_words(series))
    return drawing.to_drawing(figure, slug, said["title"], caption)


def _draw_curve(axes: Axes, each: ModelledSeries) -> tuple[float, float]:
    """Draws one series; returns the ends of what is shown."""
    counts, source = each.counts(), each.source()
    found = [interval_of(source.samples(num).total_s) for num in counts]
    lows, highs = ([interval[end] for interval in found] for end in ("low", "high"))
    band: Any = {"color": COLORS[0], "alpha": 0.18, "lw": 0}
    axes.fill_between(counts, lows, highs, label="90 % prediction interval of a run", **band)
    most, medians = each.model.rank_counts[-1], [interval["value"] for interval in found]
    num = sum(count <= most for count in counts)
    line: Any = {"color": COLORS[0], "lw": 1.3}
    axes.plot(counts[:num], medians[:num], "-", label="model", **line)
    if num < len(counts):
        start = max(0, num - 1)
        axes.plot(counts[start:], medians[start:], "--", label="model, extrapolated", **line)
    dots = [(num, run.total_s) for num, runs in each.runs.items() for run in runs]
    dot: Any = {"s": 16, "marker": "o", "color": COLORS[1], "zorder": 3}
    axes.scatter(*zip(*dots, strict=True), label="measured run", **dot)
    return min(lows), max(highs)


UNITS = {"_s": " (s)", "_j": " (J)", "_percent": " (%)"}
ONLY_JSON = ("can_run", "shares", "confidence", "searched")


def to_table(kind: str, rows: Sequence[Row], prefix: str = "", **words: str) -> ReportTable:
    """Returns a table of rows of JSON, whose headings are their keys, without empty columns.

    Title and notes are those of contents.toml, with the words for what is in braces there. An
    interval has three columns; of a list, the median is shown.
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
    said = contents()["tables"]
    words["interval"] = said["interval"]
    title, *notes = (t.format(**words) for t in (said[kind]["title"], *said[kind].get("notes", ())))
    return ReportTable(prefix + kind, title, headings, cells, notes).without_empty_columns()


POOLED = ("batch_size", "epochs")
"""Settings that the laws of a model know, so that series that differ only in them share one."""

BEYOND = 4
"""Curves and what-if tables go on to so many times the largest number of ranks that ran."""


@dataclass(frozen=True, eq=False)
class ModelledSeries:
    """A series with its model, which others share that differ in POOLED only.

    The rule is how the shape of its runs follows from the number of ranks. By number of ranks,
    `runs` are its runs, with those that were held out, and `crowded` how many of its pool were left
    out, with more threads than cores.
    """

    series: Series
    model: RunModel
    rule: ShapeRule
    runs: Mapping[int, Sequence[Observation]]
    crowded: Counter[int]

    @property
    def name(self) -> str:
        """The name of the series."""
        return self.series.name

    def source(self, changes: Changes = Changes()) -> ForecastSource:  # noqa: B008
        """Returns what predicts runs of the series."""
        return model_source(self.model, self.rule, changes)

    def counts(self) -> list[int]:
        """Returns the numbers of ranks that a curve is drawn through: all that can run, by 2."""
        found, num = set(self.runs), min(self.runs)
        while num <= BEYOND * max(self.runs):
            if self.rule.can_run(num):
                found.add(num)
            num *= 2
        return sorted(found)


Missing = list[tuple[str, str]]
"""Names, and why they have no model."""


def model_experiment(
    experiment: Experiment,
    allreduce_s: Callable[[JobShape], float] | None = None,
    ranks_per_node: int | None = None,
    held_out: Collection[int] = (),
) -> tuple[list[ModelledSeries], Missing]:
    """Returns the models of an experiment's series, and why others have none.

    `allreduce_s` returns the measured time of averaging the gradients of a step once, in s;
    `ranks_per_node` fill a node, if not those of the runs; runs on `held_out` ranks are not used.
    """
    pools: dict[Any, list[Series]] = defaultdict(list)
    for series in experiment.series:
        if series.timed:
            key = tuple((k, repr(v)) for k, v in sorted(series.settings.items()) if k not in POOLED)
            pools[key].append(series)
    modelled: list[ModelledSeries] = []
    missing: Missing = []
    for pool in pools.values():
        crowded: Counter[int] = Counter()
        runs = {each: _observed(each, crowded) for each in pool}
        used = {
            each: [run for num, some in found.items() if num not in held_out for run in some]
            for each, found in runs.items()
        }
        for each in pool:
            if not used[each]:
                reason = "all of its runs are held out" if runs[each] else _left_out(crowded)
                missing.append((each.name, reason))
        pool = [each for each in pool if used[each]]
        if not pool:
            continue
        try:
            rules = [ShapeRule.of([o.record for o in used[e]], ranks_per_node) for e in pool]
            model = fit_model([run for each in pool for run in used[each]], allreduce_s)
        except ModelError as error:
            hidden = POOLED if len(pool) > 1 else ()
            settings = {k: v for k, v in pool[0].settings.items() if k not in hidden}
            reason = "; ".join(filter(None, (str(error), _left_out(crowded))))
            missing.append((describe(settings) or "all runs", reason))
            continue
        for each, rule in zip(pool, rules, strict=True):
            modelled.append(ModelledSeries(each, model, rule, runs[each], crowded))
    return modelled, missing


def _observed(series: Series, crowded: Counter[int]) -> dict[int, list[Observation]]:
    """Returns the runs by number of ranks; counts those with more threads than cores apart."""
    found = {}
    for point in series.timed:
        runs = [observe(run.record) for run in point.runs["run"]]
        fitting = [run for run in runs if not run.shape.is_crowded]
        crowded[point.num_ranks] += len(runs) - len(fitting)
        if fitting:
            found[point.num_ranks] = fitting
    return found


def _left_out(crowded: Mapping[int, int]) -> str:
    told = [
        f"{count(num, 'run')} on {count(ranks, 'rank')}"
        for ranks, num in sorted(crowded.items())
        if num
    ]
    return f"left out, with more threads on a node than cores: {listed(told)}" if told else ""


def fitted_words(modelled: Sequence[ModelledSeries]) -> str:
    """Returns what was fitted, to how many runs, and what it cannot know, as sentences."""
    models = list({id(each.model): each.model for each in modelled}.values())
    told = [f"{count(len(m.observations), 'run')} on {listed(m.rank_counts)} ranks" for m in models]
    most = max(each.rank_counts[-1] for each in models)
    num_held_out = max(len(each.extrapolation_errors) for each in models)
    why = "which is an assumption, because fewer than three sizes tell nothing about it"
    if num_held_out:
        larger = count(num_held_out, "larger size")
        why = f"from {larger} held out and {percent(FORM_ERROR)} that is assumed"
    words = contents()["model"]["fitted"].format(
        runs=told[0] if len(set(told)) == 1 else listed(told),
        confidence=percent(PREDICTION_CONFIDENCE),
        most=count(most, "rank"),
        error=percent(max(each.form_error for each in models)),
        why=why,
    )
    shapes = [run.shape for each in models for run in each.observations]
    if all(shape.num_nodes == 1 and shape.cores_per_node for shape in shapes):
        words = f"{words} {contents()['model']['one_node']}"
    of_pools = {id(each.crowded): each.crowded for each in modelled}
    left_out = _left_out(sum(of_pools.values(), Counter()))
    return f"{words} {left_out.capitalize()}." if left_out else str(words)
