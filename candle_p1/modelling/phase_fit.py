"""The fit of one phase of a model, or of a power, with its samples of a bootstrap."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from candle_p1.modelling.fitting import choose
from candle_p1.modelling.samples import ValueInterval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from candle_p1.modelling.fitting import ChosenFits
    from candle_p1.modelling.phases import Candidate, ModelTerm
    from candle_p1.modelling.shape import JobShape

    Array = NDArray[np.float64]

PARAMETER_CONFIDENCE = 0.95
TINY = 1e-9
"""Times and powers that are smaller count as this."""


@dataclass(frozen=True)
class FittedParameter:
    """A coefficient of a model.

    Attributes:
        phase: The phase to which it belongs; for a power, what it is the power of.
        name: What it tells.
        unit: Its unit.
        value: Its value, with an interval of PARAMETER_CONFIDENCE.
        is_free: Whether no law stands behind its term.
        num_runs: The number of runs that it was fitted to.
    """

    phase: str
    name: str
    unit: str
    value: ValueInterval
    is_free: bool
    num_runs: int


@dataclass(frozen=True)
class PhaseFit:
    """The fit of one phase, or of a power.

    Attributes:
        name: One of PHASES; for a power, of POWER_GROUPS, or "" for that of the whole run.
        candidates: What was tried.
        fits: What was chosen, by the measured runs (first) and the samples.
        used: Which runs tell of it, shape (runs,).
        residuals: (measured - fitted) / scale of each run, shape (runs,); 0 for others.
        held_out: The error with which runs that were held out are predicted, relative to the
            time of the phase, or SMALLEST_SHARE of the whole; None where none could be held out.
    """

    name: str
    candidates: Sequence[Candidate]
    fits: ChosenFits
    used: NDArray[np.bool_]
    residuals: Array
    held_out: float | None

    @property
    def chosen(self) -> Candidate:
        """The terms that fit the measured runs best."""
        return self.candidates[int(self.fits.choices[0])]

    @property
    def rivals(self) -> list[Candidate]:
        """Other candidates that these runs cannot tell from the chosen one."""
        return [self.candidates[i] for i in self.fits.alike() if i != self.fits.choices[0]]

    def at(self, shape: JobShape) -> Array:
        """Returns the phase's time, or the power, of a shape for every sample."""
        rows = [np.array([term.of(shape) for term in each]) for each in self.candidates]
        return self.fits.values(rows)

    def parameters(self) -> list[FittedParameter]:
        """Returns the coefficients of the chosen terms."""
        coefficients = self.fits.coefficients[self.fits.choices[0]]
        assert coefficients is not None
        return [
            FittedParameter(
                self.name,
                term.name,
                term.unit,
                _parameter(coefficients[:, i], term),
                term.is_free,
                int(self.used.sum()),
            )
            for i, term in enumerate(self.chosen)
        ]


def _parameter(samples: Array, term: ModelTerm) -> ValueInterval:
    """Returns a coefficient; the infinite rate of a term that takes no time has no upper end."""
    tail = 50 * (1 - PARAMETER_CONFIDENCE)
    low, high = np.percentile(samples[1:], [tail, 100 - tail])
    value = samples[0]
    if term.is_rate:
        value, low, high = (1 / each if each > 0 else inf for each in (value, high, low))
    return ValueInterval(float(value), float(low), float(high), PARAMETER_CONFIDENCE)


def fit_phase(
    name: str,
    tried: Sequence[Candidate],
    shapes: Sequence[JobShape],
    samples: Array,
    scale: Array,
    random: np.random.Generator,
) -> PhaseFit:
    """Returns the fit of a phase to samples of its times.

    Args:
        name: Its name.
        tried: The candidates.
        shapes: Those of the runs.
        samples: Its times, shape (samples, runs); the first sample was measured.
        scale: What deviations are relative to, shape (runs,).
        random: For candidates that cannot be told apart.
    """
    designs = [np.array([[term.of(s) for term in each] for s in shapes]) for each in tried]
    used = np.any([design.any(axis=1) for design in designs], axis=0)
    weights = 1 / scale[used]
    groups = np.array([hash(shape) for shape in shapes])[used]
    weighted = [design[used] * weights[:, None] for design in designs]
    fits = choose(weighted, samples[:, used] * weights, groups, random)
    choice = fits.choices[0]
    coefficients = fits.coefficients[choice]
    assert coefficients is not None
    residuals = np.zeros(len(shapes))
    residuals[used] = samples[0, used] * weights - weighted[choice] @ coefficients[0]
    score = fits.scores[0, choice]
    held_out = float(np.sqrt(score)) if np.isfinite(score) else None
    return PhaseFit(name, tried, fits, used, residuals, held_out)


def scale_of(values: Array, shapes: Sequence[JobShape], least: Array | float) -> Array:
    """Returns what deviations are relative to: the mean of the runs of the same shape."""
    means: dict[JobShape, list[float]] = {}
    for shape, value in zip(shapes, values, strict=True):
        means.setdefault(shape, []).append(value)
    of_each = np.array([np.mean(means[shape]) for shape in shapes])
    scale: Array = np.maximum(of_each, np.maximum(least, TINY))
    return scale


def enlarged(fit: PhaseFit) -> Array:
    """Returns the deviations, enlarged by what fitting the terms has taken from them, (runs,)."""
    num, num_terms = int(fit.used.sum()), len(fit.chosen)
    enlarged: Array = fit.residuals * np.sqrt(len(fit.used) / max(num - num_terms, 1))
    return enlarged


def uncertain_scatter(
    fits: Sequence[PhaseFit], num_samples: int, random: np.random.Generator
) -> Array:
    """Returns how uncertain the scatter of each phase is, shape (samples, phases).

    Times a normal deviate, it is a deviate of Student's t with the phase's degrees of freedom.
    """
    degrees = np.array([max(1, int(fit.used.sum()) - len(fit.chosen)) for fit in fits])
    spread: Array = np.sqrt(degrees / random.chisquare(degrees, (num_samples, len(fits))))
    return spread


def mixed_deviations(
    residuals: Array, num_runs: int, spread: Array, random: np.random.Generator
) -> Array:
    """Returns random mixtures of the deviations of runs, shape (samples, runs, phases).

    Each is a sum over the runs that were measured, with normal weights, so that what deviates
    together in a run does so here. The first sample has none.
    """
    num = len(residuals)
    weights = random.standard_normal((len(spread), num_runs, num)) / np.sqrt(num)
    weights[0] = 0.0
    mixed: Array = (weights @ residuals) * spread[:, None, :]
    return mixed
