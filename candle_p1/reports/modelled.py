"""Models of the series of an experiment, and what has to be said about them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ModelError
from candle_p1.modelling.changes import Changes
from candle_p1.modelling.crowding import ASSUMED_WAIT_S, MOST_LOST
from candle_p1.modelling.forecast import RecordSource
from candle_p1.modelling.model import BAD_FIT, FORM_ERROR, fit_model
from candle_p1.modelling.observation import observe, shape_rule
from candle_p1.modelling.samples import PREDICTION_CONFIDENCE
from candle_p1.reports.points import describe
from candle_p1.reports.words import listed, percent
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.modelling.model import RunModel
    from candle_p1.modelling.phase_fit import PhaseFit
    from candle_p1.modelling.shape import JobShape, ShapeRule
    from candle_p1.reports.points import Experiment, Series
    from candle_p1.reports.runs import RecordedRun

POOLED = ("batch_size", "epochs")
"""Settings that the laws of a model know, so that series that differ only in them share one."""

BEYOND = 4
"""Curves and what-if tables go on to so many times the largest number of ranks that ran."""


@dataclass(frozen=True, eq=False)
class ModelledSeries:
    """A series with its model.

    Attributes:
        series: The series, with runs on numbers of ranks that were held out.
        model: The model, which others share that differ in POOLED only.
        rule: How the shape of its runs follows from the number of ranks.
    """

    series: Series
    model: RunModel
    rule: ShapeRule

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
    for whole in pools.values():
        used = {each: _runs(each, options.held_out) for each in whole}
        pool = [each for each in whole if used[each]]
        if not pool:
            missing.append((_pool_name(whole), "all of its runs are held out"))
            continue
        left_out = [each.name for each in whole if not used[each]]
        missing += [(name, "all of its runs are held out") for name in left_out]
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
            missing.append((_pool_name(pool), str(error)))
            continue
        for series, rule in zip(pool, rules, strict=True):
            modelled.append(ModelledSeries(series, model, rule))
    return tuple(modelled), tuple(missing)


def _runs(series: Series, held_out: frozenset[int]) -> list[RecordedRun]:
    points = [point for point in series.timed if point.num_ranks not in held_out]
    return [run for point in points for run in point.runs]


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
    return f"{words}{_crowding(modelled, models)}"


def _crowding(modelled: Sequence[ModelledSeries], models: Sequence[RunModel]) -> str:
    """Returns what is known of runs with more threads than cores; nothing if there are none."""
    if any(each.shape.is_crowded for model in models for each in model.observations):
        return " Some runs had more threads than cores; their times are illustrations."
    if not any(each.rule.at(num).is_crowded for each in modelled for num in each.counts()):
        return ""
    words = " Where there are more threads than cores, ranks take turns: times are illustrations."
    numbers = sorted({model.turn_loss.num_runs for model in models})
    if numbers[-1]:
        runs = listed([count(num, "such run") for num in numbers if num])
        words += (
            f" What ranks lose beyond their turns is known from {runs}; how much of it is waiting"
            " in steps, only as far as the runs differ in the share of their time that this takes."
        )
    if not numbers[0]:
        least_s, most_s = ASSUMED_WAIT_S
        words += (
            f" That ranks{' of other series' * bool(numbers[-1])} then lose 0 to"
            f" {percent(MOST_LOST)} beyond their turns, and in each step wait {1e3 * least_s:g} to"
            f" {1e3 * most_s:g} ms for each other thread of their core, is an assumption, because"
            " no such run was fitted."
        )
    return words


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
