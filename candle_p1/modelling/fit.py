"""The fit of one phase of a run, or of its power: least squares without negative coefficients.

All functions take the values of many samples of the same runs: those that were measured, and those
of a bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.modelling.laws import Candidate, JobShape
from candle_p1.modelling.samples import Array

PARAMETER_CONFIDENCE = 0.95

BAD_FIT = 0.10
"""A phase whose held-out runs are missed by more than this is reported."""

ALIKE = 1e-6
"""Candidates whose errors differ relatively by less than this cannot be told apart."""

WORTH = 1.25
"""A candidate with more terms is chosen where the squared errors without them are so many times as
large."""

TOO_MUCH = 1e-10
"""Terms are the same for these runs if the smallest singular value is this share of the largest."""


@dataclass(frozen=True)
class PhaseFit:
    """The fit of one phase, or of a power, to samples of its values; the first was measured."""

    name: str  # one of PHASES; for a power, of POWER_GROUPS, or "" for that of the whole run
    candidates: Sequence[Candidate]  # what was tried
    choices: NDArray[np.int64]  # the index of the candidate that was chosen, shape (samples,)
    # for each candidate those of all samples, shape (samples, terms); None for a candidate that
    # these runs cannot determine
    coefficients: Sequence[Array | None]
    scores: Array  # the mean squared errors of held-out runs, shape (samples, candidates)
    used: NDArray[np.bool_]  # which runs tell of it, shape (runs,)
    residuals: Array  # (measured - fitted) / scale of each run, shape (runs,); 0 for others
    scatter: Array | float = 0.0  # the deviations of new runs, shape (samples,)

    @property
    def chosen(self) -> Candidate:
        """The terms that fit the measured runs best."""
        return self.candidates[int(self.choices[0])]

    @property
    def held_out(self) -> float | None:
        """The error with which runs that were held out are predicted; None where none could be.

        It is relative to the time of the phase, or to SMALLEST_SHARE of the whole.
        """
        score = self.scores[0, self.choices[0]]
        return float(np.sqrt(score)) if np.isfinite(score) else None

    @property
    def is_bad(self) -> bool:
        """Whether held-out runs are missed by more than BAD_FIT."""
        return self.held_out is not None and self.held_out > BAD_FIT

    @property
    def rivals(self) -> list[Candidate]:
        """Other candidates, with as many terms, that these runs cannot tell from the chosen one."""
        least = self.scores[0, self.choices[0]] * (1 + ALIKE) + ALIKE**2
        return [
            each
            for i, each in enumerate(self.candidates)
            if i != self.choices[0] and len(each) == len(self.chosen) and self.scores[0, i] <= least
        ]

    @property
    def degrees(self) -> int:
        """The degrees of freedom of its deviations, at least 1."""
        return max(1, int(self.used.sum()) - len(self.chosen))

    def at(self, shape: JobShape) -> Array:
        """Returns the phase's time, or the power, of a shape, shape (samples,)."""
        predicted = np.zeros(len(self.choices))
        for i, coefficients in enumerate(self.coefficients):
            if coefficients is not None:
                row = np.array([term.of(shape) for term in self.candidates[i]], np.float64)
                predicted = np.where(self.choices == i, coefficients @ row, predicted)
        return predicted

    def parameters(self) -> list[dict[str, Any]]:
        """Returns the coefficients of the chosen terms, with intervals of PARAMETER_CONFIDENCE.

        Those of rates are the inverse; infinite, if the term takes no time.
        """
        coefficients: Any = self.coefficients[self.choices[0]]
        tail = 50 * (1 - PARAMETER_CONFIDENCE)
        found = []
        for term, samples in zip(self.chosen, coefficients.T, strict=True):
            ends = (samples[0], *np.percentile(samples[1:], [tail, 100 - tail]))
            value, low, high = map(float, ends)
            if term.is_rate:
                value, low, high = (1 / each if each > 0 else inf for each in (value, high, low))
            interval = {"value": value, "low": low, "high": high}
            fitted = {"confidence": PARAMETER_CONFIDENCE, "runs": int(self.used.sum())}
            told: dict[str, Any] = {"phase": self.name, "name": term.name, "unit": term.unit}
            found.append(told | interval | fitted)
        return found


def fit_phase(
    name: str,
    tried: Sequence[Candidate],
    shapes: Sequence[JobShape],
    samples: Array,
    scale: Array,
    random: np.random.Generator,
) -> PhaseFit:
    """Returns the fit of a phase by the candidate that predicts held-out runs best.

    All runs of a size are held out at a time where at least two sizes remain, so that candidates
    are judged by how they extrapolate; else one run at a time. A candidate with more terms has to
    be better by WORTH. Of those that cannot be told apart, every sample takes one at random, and
    the first sample the first.

    Of `samples`, shape (samples, runs), the first was measured; deviations are relative to `scale`,
    shape (runs,).
    """
    designs = [
        np.array([[term.of(s) for term in each] for s in shapes], np.float64) for each in tried
    ]
    used = np.any([design.any(axis=1) for design in designs], axis=0)
    weights = 1 / scale[used]
    designs = [design[used] * weights[:, None] for design in designs]
    values = samples[:, used] * weights
    folds = np.array([shapes.index(shape) for shape in shapes])[used]
    if len(np.unique(folds)) <= 2:
        folds = np.arange(len(folds))
    determined = np.array(list(map(_is_determined, designs)))
    coefficients: list[Any] = [None] * len(tried)
    scores = np.full((len(values), len(tried)), np.inf)
    for i in np.flatnonzero(determined):
        coefficients[i] = nonnegative_least_squares(designs[i], values)
        scores[:, i] = _held_out_errors(designs[i], values, folds)
    num_terms = np.array([len(each) for each in tried])
    # Where nothing can be held out, as with one run of each of two sizes, the simplest is taken.
    simplest = determined & (num_terms == num_terms[determined].min())
    scores[np.ix_(~np.isfinite(scores).any(axis=1), simplest)] = 0.0
    worth = scores <= WORTH * scores.min(axis=1, keepdims=True) + ALIKE**2
    fewest = np.where(worth, num_terms, np.inf).min(axis=1, keepdims=True)
    eligible = np.where(worth & (num_terms == fewest), scores, np.inf)
    tied = eligible <= eligible.min(axis=1, keepdims=True) * (1 + ALIKE) + ALIKE**2
    order = random.random(tied.shape)
    order[0] = np.arange(len(tried)) / len(tried)
    choices = np.where(tied, order, np.inf).argmin(axis=1)
    residuals = np.zeros(len(shapes))
    residuals[used] = values[0] - designs[choices[0]] @ coefficients[choices[0]][0]
    return PhaseFit(name, tried, choices, coefficients, scores, used, residuals)


def nonnegative_least_squares(design: Array, values: Array) -> Array:
    """Returns the coefficients, none of them negative, with the least squared error.

    There are few, so that trying every set of coefficients that are not 0 is exact, and for many
    samples at once faster than scipy.optimize.nnls for each. The design, shape (runs, terms), has
    full rank; values have the shape (samples, runs), and coefficients (samples, terms).
    """
    num_terms = design.shape[1]
    best = np.zeros((len(values), num_terms))
    least = np.sum(values**2, axis=1)
    for size in range(1, num_terms + 1):
        for kept in combinations(range(num_terms), size):
            columns = list(kept)
            found = values @ np.linalg.pinv(design[:, columns]).T
            error = np.sum((values - found @ design[:, columns].T) ** 2, axis=1)
            better = (found >= 0).all(axis=1) & (error < least * (1 - 1e-12))
            least[better] = error[better]
            best[better] = 0.0
            best[np.ix_(better, columns)] = found[better]
    return best


def _held_out_errors(design: Array, values: Array, folds: NDArray[np.int64]) -> Array:
    """Returns the mean squared errors of runs that were held out; infinite where none can be."""
    total, num = np.zeros(len(values)), 0
    for fold in np.unique(folds):
        out = folds == fold
        if not design[out].any():
            continue
        if not _is_determined(design[~out]):
            # What is left cannot tell the terms apart, so nothing is known of this candidate.
            return np.full(len(values), np.inf)
        fitted = nonnegative_least_squares(design[~out], values[:, ~out])
        total += np.sum((values[:, out] - fitted @ design[out].T) ** 2, axis=1)
        num += int(out.sum())
    return total / num if num else np.full(len(values), np.inf)


def _is_determined(design: Array) -> bool:
    scale = np.sqrt(np.sum(design**2, axis=0))
    if len(design) < design.shape[1] or not scale.all():
        return False
    singular = np.linalg.svd(design / scale, compute_uv=False)
    return bool(singular[-1] > TOO_MUCH * singular[0])
