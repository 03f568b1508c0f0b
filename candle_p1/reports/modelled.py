"""Models of the series of an experiment, and what has to be said about them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from candle_p1.errors import ModelError
from candle_p1.modelling.forecast import Changes, ForecastSource, model_source
from candle_p1.modelling.laws import JobShape
from candle_p1.modelling.model import FORM_ERROR, RunModel, fit_model
from candle_p1.modelling.observations import Observation, ShapeRule, observe
from candle_p1.modelling.samples import PREDICTION_CONFIDENCE
from candle_p1.reports.experiments import Experiment, Series, describe
from candle_p1.reports.words import contents, listed, percent
from candle_p1.text import count

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
