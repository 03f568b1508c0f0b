"""Models of the series of an experiment, and what has to be said about them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ModelError
from candle_p1.modelling.changes import Changes
from candle_p1.modelling.forecast import RecordSource
from candle_p1.modelling.model import BAD_FIT, FORM_ERROR, fit_model
from candle_p1.modelling.observation import observe, shape_rule
from candle_p1.modelling.samples import PREDICTION_CONFIDENCE
from candle_p1.reports.points import Point, Series, describe
from candle_p1.reports.words import listed, percent
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from candle_p1.modelling.model import RunModel
    from candle_p1.modelling.phase_fit import PhaseFit
    from candle_p1.modelling.shape import JobShape, ShapeRule
    from candle_p1.reports.points import Experiment
    from candle_p1.reports.runs import RecordedRun

POOLED = ("batch_size", "epochs")
"""Settings that the laws of a model know, so that series that differ only in them share one."""

BEYOND = 4
"""Curves and what-if tables go on to so many times the largest number of ranks that ran."""


@dataclass(frozen=True, eq=False)
class ModelledSeries:
    """A series with its model.

    Attributes:
        series: The series without crowded runs, but with those that were held out.
        model: The model, which others share that differ in POOLED only.
        rule: How the shape of its runs follows from the number of ranks.
        crowded: The shapes of the runs that were left out, of all series that share the model.
    """

    series: Series
    model: RunModel
    rule: ShapeRule
    crowded: Mapping[RecordedRun, JobShape]

    @property
    def name(self) -> str:
        """The name of the series."""
        return self.series.name

    def source(self, changes: Changes | None = None) -> RecordSource:
        """Returns what predicts runs of the series."""
        return RecordSource(self.model, self.rule, changes or Changes())

    def counts(self) -> list[int]:
        """Returns the numbers of ranks that a curve is drawn through: all that can run, by 2."""
        measured = [point.num_ranks for point in self.series.timed]
        found, num = set(measured), measured[0]
        while num <= BEYOND * measured[-1]:
            found.add(num)
            num *= 2
        return sorted(num for num in found if num in measured or self.rule.can_run(num))


@dataclass(frozen=True)
class ModelOptions:
    """How models are made.

    Attributes:
        allreduce_s: Returns the measured time of averaging the gradients of a step once, in s.
        ranks_per_node: The ranks that fill a node, if they are not those of the runs.
        held_out: The numbers of ranks whose runs are not used.
    """

    allreduce_s: Callable[[JobShape], float] | None = None
    ranks_per_node: int | None = None
    held_out: frozenset[int] = frozenset()


@lru_cache(maxsize=16)
def model_experiment(
    experiment: Experiment, options: ModelOptions = ModelOptions()
) -> tuple[tuple[ModelledSeries, ...], tuple[tuple[str, str], ...]]:
    """Returns the models of an experiment's series, and why others have none."""
    pools: dict[Any, list[Series]] = defaultdict(list)
    for series in experiment.series:
        if series.timed:
            key = tuple((k, repr(v)) for k, v in sorted(series.settings.items()) if k not in POOLED)
            pools[key].append(series)
    modelled, missing = [], []
    for every in pools.values():
        crowded = _crowded(every)
        left_out = _left_out(crowded.values())
        whole = [_without(each, crowded) for each in every]
        used = {each: _runs(each, options.held_out) for each in whole}
        reasons = {
            each: "all of its runs are held out" if each.timed else left_out
            for each in whole
            if not used[each]
        }
        pool = [each for each in whole if used[each]]
        if not pool:
            missing.append((_pool_name(whole), "; ".join(dict.fromkeys(reasons.values()))))
            continue
        missing += [(each.name, reason) for each, reason in reasons.items()]
        runs = [run for each in pool for run in used[each]]
        found = [each for run in runs if (each := observe(run.record, run.place))]
        try:
            rules = [
                shape_rule([run.record for run in each], options.ranks_per_node)
                for each in used.values()
                if each
            ]
            model = fit_model(found, options.allreduce_s)
        except ModelError as error:
            missing.append((_pool_name(pool), f"{error}; {left_out}" if left_out else str(error)))
            continue
        for series, rule in zip(pool, rules, strict=True):
            modelled.append(ModelledSeries(series, model, rule, crowded))
    return tuple(modelled), tuple(missing)


def _runs(series: Series, held_out: frozenset[int]) -> list[RecordedRun]:
    points = [point for point in series.timed if point.num_ranks not in held_out]
    return [run for point in points for run in point.runs]


def _crowded(pool: Iterable[Series]) -> dict[RecordedRun, JobShape]:
    """Returns the runs with more threads than cores, with their shapes."""
    runs = [run for series in pool for run in _runs(series, frozenset())]
    shapes = {run: found.shape for run in runs if (found := observe(run.record))}
    return {run: shape for run, shape in shapes.items() if shape.is_crowded}


def _without(series: Series, crowded: Mapping[RecordedRun, JobShape]) -> Series:
    points = [
        Point(point.num_ranks, tuple(run for run in point.all_runs if run not in crowded))
        for point in series.points
    ]
    return Series(series.settings, tuple(points))


def _left_out(shapes: Iterable[JobShape]) -> str:
    """Returns which runs are left out, and why; nothing if there are none."""
    kinds = Counter(
        (s.num_ranks, s.threads, s.ranks_on_node, s.cores_per_node or 0) for s in shapes
    )
    runs = [
        f"{count(num, 'run')} on {count(ranks, 'rank')} of {count(threads, 'thread')}"
        f" ({on_node} on a node of {count(cores, 'core')})"
        for (ranks, threads, on_node, cores), num in sorted(kinds.items())
    ]
    if not runs:
        return ""
    return f"left out of the model, which takes at most one thread for each core: {listed(runs)}"


def _pool_name(pool: Sequence[Series]) -> str:
    settings = {k: v for k, v in pool[0].settings.items() if len(pool) == 1 or k not in POOLED}
    return describe(settings) or "all runs"


def fitted_words(modelled: Sequence[ModelledSeries]) -> str:
    """Returns what was fitted, to how many runs, and what it cannot know, as sentences."""
    models = list({id(each.model): each.model for each in modelled}.values())
    told = [_fitted(model) for model in models]
    first = told[0] if len(set(told)) == 1 else listed(told)
    counts = sorted({num for model in models for num in model.rank_counts})
    words = (
        f"Fitted phase by phase to {first}. Bands are {percent(PREDICTION_CONFIDENCE)} prediction"
        " intervals for single runs, from a bootstrap over runs."
        f" Beyond {count(counts[-1], 'rank')} nothing was measured:"
        f" {_form(models)} What no measured size shows, such as a network or a file system that"
        " saturates, the model cannot know."
    )
    crowded = {run: shape for each in modelled for run, shape in each.crowded.items()}
    left_out = _left_out(crowded.values())
    return f"{words}{_further_nodes(modelled)}" + (f" {left_out.capitalize()}." if left_out else "")


def _further_nodes(modelled: Sequence[ModelledSeries]) -> str:
    """Returns where ranks are placed that do not fit on the node of the runs, if they had one."""
    shapes = [observed.shape for each in modelled for observed in each.model.observations]
    if any(shape.num_nodes > 1 or not shape.cores_per_node for shape in shapes):
        return ""
    return (
        " All runs were on one node; ranks that do not fit on it are predicted on further nodes of"
        " its kind, whose network was not measured."
    )


def _fitted(model: RunModel) -> str:
    counts = sorted({each.shape.num_ranks for each in model.observations})
    return f"{count(len(model.observations), 'run')} on {_ranks(counts)}"


def _ranks(counts: Sequence[int]) -> str:
    return f"{listed(counts)} rank{'s' * (counts != [1])}"


def _form(models: Sequence[RunModel]) -> str:
    num = max(len(model.extrapolation_errors) for model in models)
    error = max(model.form_error for model in models)
    if num:
        return (
            f"there, each factor of two adds {percent(error)} to the standard deviation, from"
            f" {count(num, 'larger size')} held out and {percent(FORM_ERROR)} that is assumed."
        )
    return (
        f"there, each factor of two adds {percent(FORM_ERROR)} to the standard deviation, which is"
        " an assumption, because fewer than three sizes tell nothing about it."
    )


def badly_fitted(model: RunModel) -> list[PhaseFit]:
    """Returns the phases whose held-out runs are missed by more than BAD_FIT."""
    return [fit for fit in model.phases if fit.held_out is not None and fit.held_out > BAD_FIT]
