"""Least squares with coefficients that are not negative, for many samples at once, and a choice.

All functions take the values of many samples of the same runs: those that were measured, and those
of a bootstrap. There are few coefficients, so that trying every set of coefficients that are not 0
is exact and fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

ALIKE = 1e-6
"""Candidates whose errors differ relatively by less than this cannot be told apart."""

WORTH = 1.25
"""A candidate with more terms is chosen where the squared errors without them are so many times as
large."""

TOO_MUCH = 1e-10
"""Terms are the same for these runs if the smallest singular value is this share of the largest."""


@dataclass(frozen=True)
class ChosenFits:
    """For each sample, which candidate was chosen, and its coefficients.

    Attributes:
        choices: The index of the candidate, shape (samples,).
        coefficients: For each candidate those of all samples, shape (samples, terms); None for a
            candidate that these runs cannot determine.
        scores: The mean squared errors of held-out runs, shape (samples, candidates).
    """

    choices: NDArray[np.int64]
    coefficients: list[Array | None]
    scores: Array

    def values(self, rows: Sequence[Array]) -> Array:
        """Returns what each sample's choice predicts, shape (samples,).

        Args:
            rows: For each candidate its terms at the point to predict, shape (terms,).
        """
        predicted = np.zeros(len(self.choices))
        for i, (coefficients, row) in enumerate(zip(self.coefficients, rows, strict=True)):
            chosen = self.choices == i
            if coefficients is not None and chosen.any():
                predicted[chosen] = coefficients[chosen] @ row
        return predicted

    def alike(self, sample: int = 0) -> list[int]:
        """Returns the candidates with as many terms as the chosen one that fit as well."""
        score = self.scores[sample, self.choices[sample]]
        chosen = self.coefficients[self.choices[sample]]
        assert chosen is not None
        return [
            i
            for i, each in enumerate(self.coefficients)
            if each is not None
            and each.shape[1] == chosen.shape[1]
            and self.scores[sample, i] <= score * (1 + ALIKE) + ALIKE**2
        ]


def nonnegative_least_squares(design: Array, values: Array) -> Array:
    """Returns the coefficients, none of them negative, with the least squared error.

    Args:
        design: The terms of every run, shape (runs, terms), of full rank.
        values: Shape (samples, runs).

    Returns:
        Shape (samples, terms).
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


def choose(
    designs: Sequence[Array],
    values: Array,
    groups: NDArray[np.int64],
    random: np.random.Generator,
) -> ChosenFits:
    """Returns for each sample the candidate that predicts held-out runs best.

    All runs of a size are held out at a time where at least two sizes remain, so that candidates
    are judged by how they extrapolate; else one run at a time. A candidate with more terms has to
    be better by WORTH. Of those that cannot be told apart, every sample takes one at random, and
    the first sample, which is the measured one, the first.

    Args:
        designs: For each candidate the terms of every run, weighted, shape (runs, terms).
        values: The weighted values, shape (samples, runs).
        groups: The size of every run, as a number, shape (runs,).
        random: For ties.

    Raises:
        ValueError: No candidate can be determined by these runs.
    """
    num_samples, num_runs = values.shape
    several = len(np.unique(groups)) > 2
    folds = groups if several else np.arange(num_runs)
    coefficients: list[Array | None] = []
    scores = np.full((num_samples, len(designs)), np.inf)
    for i, design in enumerate(designs):
        if not _is_determined(design):
            coefficients.append(None)
            continue
        coefficients.append(nonnegative_least_squares(design, values))
        scores[:, i] = _held_out_errors(design, values, folds)
    determined = [i for i, each in enumerate(coefficients) if each is not None]
    if not determined:
        raise ValueError("these runs determine no candidate")
    num_terms = np.array([design.shape[1] for design in designs])
    # Where nothing can be held out, as with one run of each of two sizes, the simplest is taken.
    first_terms = num_terms[determined].min()
    scores[np.ix_(~np.isfinite(scores).any(axis=1), num_terms == first_terms)] = 0.0
    scores[:, [i for i in range(len(designs)) if i not in determined]] = np.inf
    worth = scores <= WORTH * scores.min(axis=1, keepdims=True) + ALIKE**2
    fewest = np.where(worth, num_terms, np.inf).min(axis=1, keepdims=True)
    eligible = np.where(worth & (num_terms == fewest), scores, np.inf)
    tied = eligible <= eligible.min(axis=1, keepdims=True) * (1 + ALIKE) + ALIKE**2
    order = random.random(tied.shape)
    order[0] = np.arange(len(designs)) / len(designs)
    choices = np.where(tied, order, np.inf).argmin(axis=1)
    return ChosenFits(choices, coefficients, scores)


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
    if len(design) < design.shape[1] or not design.any():
        return False
    scale = np.sqrt(np.sum(design**2, axis=0))
    if not scale.all():
        return False
    singular = np.linalg.svd(design / scale, compute_uv=False)
    return bool(singular[-1] > TOO_MUCH * singular[0])
