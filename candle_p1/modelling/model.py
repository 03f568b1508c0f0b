"""A model of the time and the energy of the runs of a series, fitted phase by phase.

Uncertainty comes from a bootstrap over runs: every sample replaces the deviations of each run by a
random mixture of those that were found, with all phases of a run kept together, and fits and
chooses again. Deviations are enlarged as for Student's t, so that few runs give wide intervals.
docs/modelling.md derives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import log2
from typing import Any

import numpy as np

from candle_p1.errors import ModelError
from candle_p1.modelling.fit import PhaseFit, fit_phase
from candle_p1.modelling.laws import PHASES, POWER, Candidate, JobShape, candidates
from candle_p1.modelling.observations import POWER_GROUPS, Observation
from candle_p1.modelling.samples import Array, TimeSamples
from candle_p1.text import count

NUM_SAMPLES = 999
"""Samples of the bootstrap; their first is the fit itself."""

SMALLEST_SHARE = 0.005
"""Deviations of a phase are measured against its time, and at least this share of the total."""

FORM_ERROR = 0.05
"""What extrapolating by a factor of two adds to the standard deviation of a time, relatively, as
far as larger sizes that are held out do not tell: it counts like one of them. It is a choice, and
stands in every report."""

LEAST_SHARE = 0.1
"""The least share of a fitted time that a sample of it has, however much runs scatter."""

TINY = 1e-9
"""Times and powers that are smaller count as this."""


@dataclass(frozen=True)
class RunModel:
    """A model of a series."""

    observations: Sequence[Observation]  # the runs that the phases were fitted to
    phases: Sequence[PhaseFit]  # the fit of each phase
    powers: Sequence[PhaseFit]  # the fits of power; empty where it was not measured
    # what extrapolating by a factor of two adds to the relative standard deviation
    form_error: float
    # by how much larger sizes were missed when they were held out, each relatively and for a
    # factor of two
    extrapolation_errors: Sequence[float]
    # the deviation of every sample for a factor of two, as a logarithm, shape (samples,)
    form: Array = field(repr=False)

    @property
    def degrees(self) -> int:
        """The degrees of freedom of the deviations."""
        return len(self.observations) - max(len(fit.chosen) for fit in self.phases)

    @property
    def rank_counts(self) -> list[int]:
        """The numbers of ranks of all runs that it was made from."""
        return sorted({each.shape.num_ranks for each in self.observations})

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """The coefficients of all phases and powers."""
        return [each for fit in (*self.phases, *self.powers) for each in fit.parameters()]

    def predict(self, shape: JobShape) -> TimeSamples:
        """Returns single runs: with their scatter, and what extrapolating adds."""
        times = {fit.name: fit.at(shape) for fit in self.phases}
        fewest, *_, most = self.rank_counts
        factor = max(1.0, shape.num_ranks / most, fewest / shape.num_ranks)
        form = np.exp(log2(factor) * self.form)
        least = SMALLEST_SHARE * np.sum(list(times.values()), axis=0)
        for fit in self.phases:
            seconds = times[fit.name]
            deviating = seconds + fit.scatter * np.maximum(seconds, least)
            times[fit.name] = np.maximum(deviating, LEAST_SHARE * seconds) * form
        if not self.powers:
            return TimeSamples(shape.num_ranks, times, None, factor)
        watts = {
            fit.name: np.maximum(fit.at(shape) * (1 + fit.scatter), TINY) for fit in self.powers
        }
        group_of = {phase: group for group, phases in POWER_GROUPS.items() for phase in phases}
        watts = {name: watts.get(group_of.get(name, ""), watts[""]) for name in times}
        return TimeSamples(shape.num_ranks, times, watts, factor)


def fit_model(
    observations: Sequence[Observation],
    allreduce_s: Callable[[JobShape], float] | None = None,
    seed: int = 0,
    num_samples: int = NUM_SAMPLES,
) -> RunModel:
    """Fits a model to the runs of a series, on at least two numbers of ranks.

    See `candidates` for `allreduce_s`. The seed is that of the bootstrap.

    Raises:
        ModelError: There are too few runs for an interval, or all are on as many ranks.
    """
    if len(observations) < 2:
        raise ModelError(
            f"a model needs at least 2 runs of a series, but there is {len(observations)}: repeat"
            " the runs"
        )
    counts = {each.shape.num_ranks for each in observations}
    if len(counts) < 2:
        raise ModelError(
            f"all runs are on {count(counts.pop(), 'rank')}: a model needs runs on at least 2"
            " numbers of ranks"
        )
    random = np.random.default_rng(seed)
    shapes = [each.shape for each in observations]
    least_s = SMALLEST_SHARE * np.array([each.total_s for each in observations])
    values = {name: np.array([each.phases_s[name] for each in observations]) for name in PHASES}
    values = {name: seconds for name, seconds in values.items() if seconds.any()}
    tried = {name: candidates(name, shapes, allreduce_s) for name in values}
    phases = _bootstrap(values, tried, shapes, least_s, num_samples, random)
    known = [g for g in ("", *POWER_GROUPS) if all(g in each.watts for each in observations)]
    watts = {group: np.array([each.watts[group] for each in observations]) for group in known}
    powers = []
    if "" in known:
        on_all = dict.fromkeys(known, POWER)
        powers = _bootstrap(watts, on_all, shapes, TINY, num_samples, random)
    errors = _extrapolation_errors(values, tried, shapes, least_s, random)
    form_error = float(np.sqrt(np.mean(np.square([FORM_ERROR, *errors]))))
    form = form_error * random.standard_normal(num_samples)
    form[0] = 0.0
    return RunModel(observations, phases, powers, form_error, errors, form)


def _bootstrap(
    values: Mapping[str, Array],
    tried: Mapping[str, Sequence[Candidate]],
    shapes: Sequence[JobShape],
    least: Array | float,
    num_samples: int,
    random: np.random.Generator,
) -> list[PhaseFit]:
    scales = {name: _scale(each, shapes, least) for name, each in values.items()}
    first = [
        fit_phase(name, tried[name], shapes, each[None, :], scales[name], random)
        for name, each in values.items()
    ]
    most_terms = max(len(fit.chosen) for fit in first)
    if len(shapes) <= most_terms:
        raise ModelError(
            f"{count(len(shapes), 'run')} are too few to estimate the scatter, with {most_terms}"
            " terms for a phase: repeat the runs"
        )
    # Times a normal deviate, the spread is one of Student's t with the degrees of freedom; what
    # fitting the terms has taken from the deviations is given back.
    degrees = np.array([fit.degrees for fit in first])
    spread = np.sqrt(degrees / random.chisquare(degrees, (num_samples, len(first))))
    residuals = np.stack([fit.residuals for fit in first], axis=1)
    residuals *= np.sqrt(len(shapes) / degrees)
    drawn = _mixed(residuals, len(shapes), spread, random)
    fits = []
    for i, fit in enumerate(first):
        scale = scales[fit.name]
        fitted = values[fit.name] - fit.residuals * scale
        samples = np.maximum(fitted + drawn[:, :, i] * scale, LEAST_SHARE * fitted)
        samples[0] = values[fit.name]
        fits.append(fit_phase(fit.name, fit.candidates, shapes, samples, scale, random))
    scatter = _mixed(residuals, 1, spread, random)[:, 0, :]
    return [replace(fit, scatter=scatter[:, i]) for i, fit in enumerate(fits)]


def _mixed(residuals: Array, num_runs: int, spread: Array, random: np.random.Generator) -> Array:
    """Returns random mixtures of the deviations of runs, shape (samples, runs, phases).

    Each is a sum over the runs that were measured, with normal weights, so that what deviates
    together in a run does so here. The first sample has none.
    """
    weights = random.standard_normal((len(spread), num_runs, len(residuals)))
    weights[0] = 0.0
    mixed: Array = (weights / np.sqrt(len(residuals)) @ residuals) * spread[:, None, :]
    return mixed


def _scale(values: Array, shapes: Sequence[JobShape], least: Array | float) -> Array:
    """Returns what deviations are relative to: the mean of the runs of the same shape."""
    means = [np.mean(values[[other == shape for other in shapes]]) for shape in shapes]
    scale: Array = np.maximum(means, np.maximum(least, TINY))
    return scale


def _extrapolation_errors(
    values: Mapping[str, Array],
    tried: Mapping[str, Sequence[Candidate]],
    shapes: Sequence[JobShape],
    least_s: Array,
    random: np.random.Generator,
) -> list[float]:
    """Returns by how much the total is missed, relatively and for a factor of two in ranks.

    The runs on the most ranks are predicted from all others, then those on the second most from
    the ones on fewer, as long as two sizes remain. What the laws do not know shows in that.
    """
    counts = np.array([shape.num_ranks for shape in shapes])
    sizes = np.unique(counts)
    errors = []
    for before, largest in list(pairwise(sizes[1:]))[::-1]:
        kept = counts < largest
        few = [shape for shape in shapes if shape.num_ranks < largest]
        there = next(shape for shape in shapes if shape.num_ranks == largest)
        predicted_s = measured_s = 0.0
        for name, seconds in values.items():
            measured_s += float(np.mean(seconds[counts == largest]))
            if seconds[kept].any():
                scale = _scale(seconds, shapes, least_s)[kept]
                fit = fit_phase(name, tried[name], few, seconds[None, kept], scale, random)
                predicted_s += float(fit.at(there)[0])
        errors.append((predicted_s / measured_s - 1) / log2(largest / before))
    return errors
