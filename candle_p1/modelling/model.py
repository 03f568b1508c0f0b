"""A model of the time and the energy of the runs of a series, fitted phase by phase.

Uncertainty comes from a bootstrap over runs: every sample replaces the deviations of each run by a
random mixture of those that were found, with all phases of a run kept together, and fits and
chooses again. Deviations are enlarged as for Student's t, so that few runs give wide intervals.
docs/modelling.md derives it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2
from typing import TYPE_CHECKING

import numpy as np

from candle_p1.errors import ModelError
from candle_p1.modelling.observation import POWER_GROUPS
from candle_p1.modelling.phase_fit import (
    TINY,
    FittedParameter,
    PhaseFit,
    enlarged,
    fit_phase,
    mixed_deviations,
    scale_of,
    uncertain_scatter,
)
from candle_p1.modelling.phases import PHASES, POWER, candidates, free_candidates
from candle_p1.modelling.samples import TimeSamples
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from candle_p1.modelling.observation import Observation
    from candle_p1.modelling.phases import Candidate
    from candle_p1.modelling.shape import JobShape

    Array = NDArray[np.float64]

NUM_SAMPLES = 999
"""Samples of the bootstrap; their first is the fit itself."""

BAD_FIT = 0.10
"""A phase whose held-out runs are missed by more than this gets free terms, and is reported."""

FREE_FROM = 4
"""Free terms take at least so many sizes."""

SMALLEST_SHARE = 0.005
"""Deviations of a phase are measured against its time, and at least this share of the total."""

FORM_ERROR = 0.05
"""What extrapolating by a factor of two adds to the standard deviation of a time, relatively, as
far as larger sizes that are held out do not tell: it counts like one of them. It is a choice, and
stands in every report."""

LEAST_SHARE = 0.1
"""The least share of a fitted time that a sample of it has, however much runs scatter: there is no
run that takes no time."""


@dataclass(frozen=True)
class RunModel:
    """A model of a series.

    Attributes:
        observations: The runs that the phases were fitted to.
        phases: The fit of each phase.
        powers: The fits of power; empty where it was not measured.
        degrees: The degrees of freedom of the deviations.
        form_error: What extrapolating by a factor of two adds to the relative standard deviation.
        extrapolation_errors: By how much larger sizes were missed when they were held out, each
            relatively and for a factor of two.
        scatter: The deviations of new runs, for each sample and phase, shape (samples, phases).
        power_scatter: Likewise of the powers, shape (samples, powers).
        form: The deviation of every sample for a factor of two, as a logarithm, shape (samples,).
    """

    observations: Sequence[Observation]
    phases: Sequence[PhaseFit]
    powers: Sequence[PhaseFit]
    degrees: int
    form_error: float
    extrapolation_errors: Sequence[float]
    scatter: Array = field(repr=False)
    power_scatter: Array = field(repr=False)
    form: Array = field(repr=False)

    @property
    def rank_counts(self) -> list[int]:
        """The numbers of ranks of all runs that it was made from."""
        return sorted({each.shape.num_ranks for each in self.observations})

    @property
    def parameters(self) -> list[FittedParameter]:
        """The coefficients of all phases and powers."""
        return [each for fit in (*self.phases, *self.powers) for each in fit.parameters()]

    def extrapolation(self, num_ranks: int) -> float:
        """Returns by which factor a number of ranks is outside those that were measured."""
        least, most = self.rank_counts[0], self.rank_counts[-1]
        return max(1.0, num_ranks / most, least / num_ranks)

    def curve(self, shape: JobShape) -> TimeSamples:
        """Returns the mean over runs, with the uncertainty of the fit alone."""
        return self._samples(shape, runs=False)

    def predict(self, shape: JobShape) -> TimeSamples:
        """Returns single runs: with their scatter, and what extrapolating adds."""
        return self._samples(shape, runs=True)

    def _samples(self, shape: JobShape, *, runs: bool) -> TimeSamples:
        times = {fit.name: fit.at(shape) for fit in self.phases}
        factor = self.extrapolation(shape.num_ranks)
        form: Array | float = 1.0
        if runs:
            least = SMALLEST_SHARE * np.sum(list(times.values()), axis=0)
            for i, (name, seconds) in enumerate(times.items()):
                deviating = seconds + self.scatter[:, i] * np.maximum(seconds, least)
                times[name] = np.maximum(deviating, LEAST_SHARE * seconds)
            form = np.exp(log2(factor) * self.form)
        times = {name: each * form for name, each in times.items()}
        watts = self._watts(shape, times, runs=runs)
        return TimeSamples(shape.num_ranks, times, watts, factor)

    def _watts(
        self, shape: JobShape, phases: Iterable[str], *, runs: bool
    ) -> dict[str, Array] | None:
        """Returns the power of the job in each phase; None where it was not measured."""
        if not self.powers:
            return None
        watts = {}
        for i, fit in enumerate(self.powers):
            scatter = 1 + self.power_scatter[:, i] if runs else 1.0
            watts[fit.name] = np.maximum(fit.at(shape) * scatter, TINY)
        group_of = {phase: group for group, phases in POWER_GROUPS.items() for phase in phases}
        return {name: watts.get(group_of.get(name, ""), watts[""]) for name in phases}


def fit_model(
    observations: Sequence[Observation],
    allreduce_s: Callable[[JobShape], float] | None = None,
    seed: int = 0,
    num_samples: int = NUM_SAMPLES,
) -> RunModel:
    """Fits a model to the runs of a series.

    Args:
        observations: The runs, on at least two numbers of ranks.
        allreduce_s: Returns the measured time of averaging all gradients of a step once, in s.
        seed: That of the bootstrap.
        num_samples: The samples of the bootstrap.

    Raises:
        ModelError: There are too few runs for an interval, or all are on as many ranks.
    """
    if len(observations) < 2:
        raise ModelError(
            f"a model takes at least 2 runs of a series, and there is {len(observations)}: repeat"
            " the runs"
        )
    counts = {each.shape.num_ranks for each in observations}
    if len(counts) < 2:
        raise ModelError(
            f"all runs are on {count(counts.pop(), 'rank')}, which tells nothing of others: a model"
            " takes at least 2 numbers of ranks"
        )
    random = np.random.default_rng(seed)
    shapes = [each.shape for each in observations]
    totals_s = np.array([each.total_s for each in observations])
    values = {name: np.array([each.phases_s[name] for each in observations]) for name in PHASES}
    tried = {
        name: _tried(name, shapes, seconds, totals_s, allreduce_s)
        for name, seconds in values.items()
        if seconds.any()
    }
    scales = {name: scale_of(values[name], shapes, SMALLEST_SHARE * totals_s) for name in tried}
    first = [fit_phase(n, tried[n], shapes, values[n][None, :], scales[n], random) for n in tried]
    most_terms = max(len(fit.chosen) for fit in first)
    degrees = len(observations) - most_terms
    if degrees < 1:
        raise ModelError(
            f"{count(len(observations), 'run')} leave nothing to estimate the scatter from, with"
            f" {most_terms} terms for a phase: repeat the runs"
        )
    spread = uncertain_scatter(first, num_samples, random)
    residuals = np.stack([enlarged(fit) for fit in first], axis=1)
    drawn = mixed_deviations(residuals, len(observations), spread, random)
    fits = []
    for i, fit in enumerate(first):
        fitted = values[fit.name] - fit.residuals * scales[fit.name]
        samples = np.maximum(fitted + drawn[:, :, i] * scales[fit.name], LEAST_SHARE * fitted)
        samples[0] = values[fit.name]
        fits.append(fit_phase(fit.name, tried[fit.name], shapes, samples, scales[fit.name], random))
    scatter = mixed_deviations(residuals, 1, spread, random)[:, 0, :]
    powers, power_scatter = _fit_powers(observations, num_samples, random)
    errors = _extrapolation_errors(first, tried, shapes, values, scales, random)
    form_error = float(np.sqrt(np.mean(np.square([FORM_ERROR, *errors]))))
    form = form_error * random.standard_normal(num_samples)
    form[0] = 0.0
    return RunModel(
        observations,
        fits,
        powers,
        degrees,
        form_error,
        errors,
        scatter,
        power_scatter,
        form,
    )


def _tried(
    name: str,
    shapes: Sequence[JobShape],
    seconds: Array,
    totals_s: Array,
    allreduce_s: Callable[[JobShape], float] | None,
) -> list[Candidate]:
    """Returns the candidates of a phase: free ones too, where no law predicts held-out sizes."""
    lawful = candidates(name, shapes, allreduce_s)
    if len({shape.num_ranks for shape in shapes}) < FREE_FROM:
        return lawful
    random = np.random.default_rng(0)
    scale = scale_of(seconds, shapes, SMALLEST_SHARE * totals_s)
    fit = fit_phase(name, lawful, shapes, seconds[None, :], scale, random)
    if fit.held_out is None or fit.held_out <= BAD_FIT:
        return lawful
    both = [*lawful, *free_candidates(name)]
    chosen = fit_phase(name, both, shapes, seconds[None, :], scale, random).chosen
    return [*lawful, chosen] if chosen not in lawful else lawful


def _fit_powers(
    observations: Sequence[Observation], num_samples: int, random: np.random.Generator
) -> tuple[list[PhaseFit], Array]:
    """Fits the powers that all runs have, and returns the deviations of new runs."""
    known = [group for group in ("", *POWER_GROUPS) if all(group in o.watts for o in observations)]
    if "" not in known:
        return [], np.zeros((num_samples, 0))
    shapes = [each.shape for each in observations]
    values = {name: np.array([o.watts[name] for o in observations]) for name in known}
    scales = {name: scale_of(values[name], shapes, TINY) for name in known}
    first = [fit_phase(n, POWER, shapes, values[n][None, :], scales[n], random) for n in known]
    spread = uncertain_scatter(first, num_samples, random)
    residuals = np.stack([enlarged(fit) for fit in first], axis=1)
    drawn = mixed_deviations(residuals, len(observations), spread, random)
    fits = []
    for i, fit in enumerate(first):
        samples = values[fit.name] + (drawn[:, :, i] - fit.residuals) * scales[fit.name]
        samples[0] = values[fit.name]
        fits.append(fit_phase(fit.name, POWER, shapes, samples, scales[fit.name], random))
    scatter: Array = mixed_deviations(residuals, 1, spread, random)[:, 0, :]
    return fits, scatter


def _extrapolation_errors(
    fits: Sequence[PhaseFit],
    tried: Mapping[str, Sequence[Candidate]],
    shapes: Sequence[JobShape],
    values: Mapping[str, Array],
    scales: Mapping[str, Array],
    random: np.random.Generator,
) -> list[float]:
    """Returns by how much the total is missed, relatively and for a factor of two in ranks.

    The runs on the most ranks are predicted from all others, then those on the second most from
    the ones on fewer, as long as two sizes remain. What the laws do not know shows in that.
    """
    counts = np.array([shape.num_ranks for shape in shapes])
    sizes = sorted(set(counts.tolist()))
    errors = []
    for largest, before in list(zip(sizes[2:], sizes[1:], strict=False))[::-1]:
        kept, out = counts < largest, counts == largest
        few = [shape for shape, keep in zip(shapes, kept, strict=True) if keep]
        there = next(shape for shape, is_out in zip(shapes, out, strict=True) if is_out)
        predicted_s = 0.0
        for fit in fits:
            seconds = values[fit.name][kept]
            if seconds.any():
                lawful = [each for each in tried[fit.name] if not any(t.is_free for t in each)]
                again = fit_phase(
                    fit.name, lawful, few, seconds[None, :], scales[fit.name][kept], random
                )
                predicted_s += float(again.at(there)[0])
        measured_s = float(np.mean(sum(values[fit.name][out] for fit in fits)))
        errors.append((predicted_s / measured_s - 1) / log2(largest / before))
    return errors
