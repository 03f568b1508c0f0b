"""Metrics of predictions, and their bootstrap intervals.

A metric is computed from the weights of the samples, for many sets of weights at once. Weights of 1
give its value; how often each sample was drawn, with replacement, gives a draw of the bootstrap
(Efron and Tibshirani, *An Introduction to the Bootstrap*, 1993, chapter 13). Samples of one unit,
such as a patient, are drawn together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.models.scores import LEAST_PROBABILITY, ConfusionScore, RegressionScore

Floats = NDArray[np.float64]
Values = dict[str, Floats]
"""Metrics by name, each with an axis of draws in front; those of classes have a second axis."""

CONFIDENCE = 0.95
NUM_BINS = 10
"""Of the reliability, equally wide, from 0 to 1."""
BLOCK_VALUES = 2_000_000
"""About how many weights are held at a time."""
POOLED_BYTES = 2**28
LEAST_POOLS = 50


def bootstrap(
    units: NDArray[np.int64],
    compute: Callable[[Floats], Values],
    num_draws: int,
    seed: int,
    values_per_draw: int = 0,
) -> Values:
    """Returns metrics of samples that are drawn with replacement, in units.

    Args:
        units: The unit of each sample, shape (samples,), numbered from 0 without gaps.
        compute: Returns metrics for weights, float64, shape (draws, samples).
        num_draws: How often samples are drawn.
        seed: Of the draws.
        values_per_draw: How many values `compute` holds for each draw, if more than its weights.
    """
    num_units = int(units.max()) + 1
    random = np.random.default_rng(seed)
    at_once = max(1, BLOCK_VALUES // max(len(units), values_per_draw))
    blocks = []
    for first in range(0, num_draws, at_once):
        drawn = random.integers(num_units, size=(min(at_once, num_draws - first), num_units))
        times = np.stack([np.bincount(row, minlength=num_units) for row in drawn])
        blocks.append(compute(times[:, units].astype(np.float64)))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def with_interval(
    value: float, draws: Floats, confidence: float = CONFIDENCE, *, is_biased: bool = False
) -> dict[str, float | None]:
    """Returns a metric with its percentile interval: value, low and high.

    The ends are None if it has the same value in all draws, which says nothing about how far the
    truth may lie, or in less than half of them has a value at all. The draws of a metric that
    `is_biased` are first shifted so that their mean is its value; such a metric is at least 0.
    """
    known = draws[np.isfinite(draws)]
    ends: list[float | None] = [None, None]
    if np.isfinite(value) and 2 * len(known) > len(draws) and np.ptp(known) > 0:
        shift = value - known.mean() if is_biased else 0.0
        outside = (1 - confidence) / 2
        low, high = np.quantile(known, [outside, 1 - outside]) + shift
        ends = [max(float(low), 0.0) if is_biased else float(low), float(high)]
    return {"value": float(value) if np.isfinite(value) else None, "low": ends[0], "high": ends[1]}


class Points(NamedTuple):
    """The points of a class's curves, from the strictest threshold on: shapes (thresholds,)."""

    thresholds: Floats
    false_positive_rate: Floats
    recall: Floats
    precision: Floats


class Ranking:
    """How a score ranks the samples of a class and all others; equal scores are one rank.

    Args:
        scores: Shape (samples,); higher where the class is more probable.
        is_class: Whether each sample has the class, shape (samples,).
    """

    def __init__(self, scores: NDArray[Any], is_class: NDArray[np.bool_]) -> None:
        self._order = np.argsort(-scores, kind="stable")
        self._ordered, self._hits = scores[self._order], is_class[self._order]
        # Where the rank of each sample of the class begins and ends: among all, and in the class.
        places = np.flatnonzero(self._hits)
        falling = -self._ordered
        self._begin, self._end = (
            np.searchsorted(falling, falling[places], side) for side in ("left", "right")
        )
        self._first, self._last = (np.searchsorted(places, at) for at in (self._begin, self._end))

    def areas(self, weights: Floats) -> tuple[Floats, Floats]:
        """Returns the areas under the ROC curve and of average precision: shapes (draws,).

        The first is the probability that a sample of the class ranks above another one, where a tie
        counts as half. The second is the mean precision at the ranks of the class's samples, with
        no interpolation. NaN where the class has no samples or, for the first, all of them.
        """
        ordered = np.take(weights, self._order, axis=1)
        of_class = ordered[:, self._hits]
        taken, hits = _from_zero(ordered), _from_zero(of_class)
        num, num_others = hits[:, -1], taken[:, -1] - hits[:, -1]
        above = taken[:, self._begin] - hits[:, self._first]
        taken, hits = taken[:, self._end], hits[:, self._last]
        below = num_others[:, np.newaxis] - (above + taken - hits) / 2
        precision = np.divide(hits, taken, out=np.zeros_like(hits), where=taken > 0)
        with np.errstate(invalid="ignore"):
            roc = np.einsum("dr,dr->d", of_class, below) / (num * num_others)
            return roc, np.einsum("dr,dr->d", of_class, precision) / num

    def points(self) -> Points:
        """Returns the curves' points."""
        ends = np.flatnonzero(np.r_[self._ordered[1:] != self._ordered[:-1], True])
        hits = np.cumsum(self._hits)[ends].astype(np.float64)
        others = ends + 1 - hits
        with np.errstate(invalid="ignore"):
            rates = others / others[-1], hits / hits[-1]
        thresholds = self._ordered[ends].astype(np.float64)
        return Points(thresholds, *rates, hits / (ends + 1))


class ClassMetrics:
    """Metrics of predicted classes.

    Args:
        true: The class of each sample, int64, shape (samples,).
        scores: The model's outputs, shape (samples, classes): the largest one marks the class that
            is predicted.
        probabilities: The same as probabilities, by which samples are ranked: rows have the sum 1.
    """

    def __init__(
        self, true: NDArray[np.int64], scores: NDArray[Any], probabilities: NDArray[Any]
    ) -> None:
        self.num_classes = scores.shape[1]
        self._cells = true * self.num_classes + scores.argmax(axis=1)
        self._true, self._probabilities = true, probabilities.astype(np.float64)
        p = self._probabilities
        rows = np.arange(len(true))
        self._confidence = p.max(axis=1)
        self._is_right = (scores.argmax(axis=1) == true).astype(np.float64)
        brier = np.square(p).sum(axis=1) - 2 * p[rows, true] + 1
        log_loss = -np.log(np.maximum(p[rows, true], LEAST_PROBABILITY))
        self._of_samples = {"brier": brier, "log_loss": log_loss}
        self._bins = np.minimum((self._confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)

    @cached_property
    def rankings(self) -> list[Ranking]:
        """One of each class."""
        classes = range(self.num_classes)
        return [Ranking(self._probabilities[:, i], self._true == i) for i in classes]

    def confusion(self, weights: Floats) -> ConfusionScore:
        """Returns the weights by true and predicted class: shape (draws, classes, classes)."""
        score = ConfusionScore(self.num_classes)
        sums = _sums_by(self._cells, self.num_classes**2, weights)
        score.sums = sums.reshape(-1, self.num_classes, self.num_classes)
        return score

    def __call__(self, weights: Floats) -> Values:
        """Returns all metrics; those of classes are NaN where they have no samples."""
        score, total = self.confusion(weights), weights.sum(axis=1)
        of_classes = score.per_class()
        num = of_classes.pop("num_samples")
        num_predicted = score.sums.sum(axis=-2)
        values = score.result()
        areas = [ranking.areas(weights) for ranking in self.rankings]
        of_classes |= dict(zip(("auroc", "average_precision"), np.stack(areas, 2), strict=True))
        of_classes["recall"] = np.where(num > 0, of_classes["recall"], np.nan)
        of_classes["precision"] = np.where(num_predicted > 0, of_classes["precision"], np.nan)
        of_classes["f1"] = np.where(num + num_predicted > 0, of_classes["f1"], np.nan)
        values["balanced_accuracy"] = _mean_over_classes(of_classes["recall"])
        for name in ("auroc", "average_precision"):
            values[name] = _mean_over_classes(of_classes[name])
        for name, of_samples in self._of_samples.items():
            values[name] = weights @ of_samples / total
        gaps = _sums_by(self._bins, NUM_BINS, weights * (self._is_right - self._confidence))
        values["ece"] = np.abs(gaps).sum(axis=1) / total
        return values | {f"class_{name}": value for name, value in of_classes.items()}

    def reliability(self) -> list[dict[str, float | int | None]]:
        """Returns for each bin of the largest probability how often its class was the true one."""
        ones = np.ones((1, len(self._true)))
        num, confidence, right = (
            _sums_by(self._bins, NUM_BINS, ones * values)[0]
            for values in (1, self._confidence, self._is_right)
        )
        return [
            {
                "low": i / NUM_BINS,
                "high": (i + 1) / NUM_BINS,
                "num_samples": int(num[i]),
                "mean_probability": confidence[i] / num[i] if num[i] else None,
                "accuracy": right[i] / num[i] if num[i] else None,
            }
            for i in range(NUM_BINS)
        ]

    def ece_if_calibrated(self, num_draws: int, seed: int) -> Floats:
        """Returns the calibration errors of samples that are right as often as the model says.

        They are what chance alone makes of it: shape (draws,).
        """
        random = np.random.default_rng(seed)
        errors = np.empty(num_draws)
        for i in range(num_draws):
            is_right = random.random(len(self._true)) < self._confidence
            gaps = np.bincount(self._bins, is_right - self._confidence, NUM_BINS)
            errors[i] = np.abs(gaps).sum() / len(self._true)
        return errors


class RegressionMetrics:
    """Metrics of predicted values, from sums over the samples of each unit.

    Args:
        units: The unit of each sample, int64, shape (samples,), numbered from 0 without gaps.
        num_outputs: The values that are predicted for each sample. If there are many, units are
            pooled at random, because the sums of each unit and output would not fit in memory.
        cutoffs: What separates the classes of values, for an accuracy; may be empty.
        seed: Of the pooling.

    Attributes:
        pools: The unit, or the pool, of each sample, to draw by, shape (samples,).
        score: The sums over all samples, in the order of the updates.
    """

    def __init__(
        self,
        units: NDArray[np.int64],
        num_outputs: int,
        cutoffs: tuple[float, ...] | None = None,
        seed: int = 0,
    ) -> None:
        num_units = int(units.max()) + 1
        most = max(LEAST_POOLS, POOLED_BYTES // (7 * 8 * num_outputs))
        pool_of = np.arange(num_units)
        if num_units > most:
            pool_of = np.random.default_rng(seed).permutation(num_units) % most
        self.pools = pool_of[units]
        self.num_pools = min(num_units, most)
        self.score = RegressionScore(num_outputs)
        self.errors: list[Floats] = []
        self._cutoffs = cutoffs
        self._sums = np.zeros((self.num_pools, 7, num_outputs))
        self._further = np.zeros((self.num_pools, 2))
        self._num = 0

    def update(self, true: NDArray[Any], predicted: NDArray[Any]) -> None:
        """Adds the next samples; both shapes (samples, outputs)."""
        self.score.update(true, predicted)
        pools = self.pools[self._num : self._num + len(true)]
        order = np.argsort(pools, kind="stable")
        present, starts = np.unique(pools[order], return_index=True)
        t, p = (each[order].astype(np.float64) for each in (true, predicted))
        one, error = np.ones((len(t), 1)), p - t
        pairs = (one, one), (t, one), (p, one), (t, t), (p, p), (t, p), (error, error)
        for i, (a, b) in enumerate(pairs):
            self._sums[present, i] += np.add.reduceat(a * b, starts)
        difference = predicted.astype(np.float64) - true
        self.errors.append(np.square(difference).mean(axis=1))
        hits = np.zeros(len(true))
        if self._cutoffs is not None:
            sides = (np.digitize(each[:, 0], np.sort(self._cutoffs)) for each in (true, predicted))
            hits = np.equal(*sides).astype(np.float64)
        further = np.stack([np.abs(difference).mean(axis=1), hits], axis=1)
        np.add.at(self._further, pools, further)
        self._num += len(true)

    def values(self) -> Values:
        """Returns the metrics of all samples, each with an axis of one draw."""
        found = {name: np.array([value]) for name, value in self.score.result().items()}
        return found | self._means(np.ones((1, self.num_pools)))

    def draws(self, num_draws: int, seed: int) -> Values:
        """Returns the metrics of `num_draws` draws of the bootstrap."""

        def compute(weights: Floats) -> Values:
            score = RegressionScore(self._sums.shape[2])
            score.sums = np.tensordot(weights, self._sums, 1)
            return score.result() | self._means(weights)

        return bootstrap(
            np.arange(self.num_pools), compute, num_draws, seed, 7 * self._sums.shape[2]
        )

    def _means(self, weights: Floats) -> Values:
        num = weights @ self._sums[:, 0, 0]
        error, hits = (weights @ self._further).T / num
        return {"mae": error} | ({"accuracy": hits} if self._cutoffs is not None else {})


def number_units(groups: list[str] | None, num_samples: int) -> NDArray[np.int64]:
    """Returns the unit of each sample: its group or, without groups, the sample itself."""
    if groups is None:
        return np.arange(num_samples)
    return np.unique(groups, return_inverse=True)[1].astype(np.int64)


def summarize(
    values: Mapping[str, Floats], draws: Mapping[str, Floats], biased: tuple[str, ...] = ("ece",)
) -> dict[str, dict[str, float | None]]:
    """Returns metrics, each of one value, with their intervals; see `with_interval`."""
    return {
        name: with_interval(float(value[0]), draws[name], is_biased=name in biased)
        for name, value in values.items()
    }


def _sums_by(numbers: NDArray[np.int64], num: int, weights: Floats) -> Floats:
    """Returns the sums of weights, shape (draws, samples), by the samples' numbers below `num`."""
    order = np.argsort(numbers, kind="stable")
    present, starts = np.unique(numbers[order], return_index=True)
    sums = np.zeros((len(weights), num))
    sums[:, present] = np.add.reduceat(weights[:, order], starts, axis=1)
    return sums


def _from_zero(values: Floats) -> Floats:
    """Returns the sums of the values before each place, and of all: shape (draws, values + 1)."""
    sums = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


def _mean_over_classes(values: Floats) -> Floats:
    """Returns the mean over those classes that have a value; NaN if none has."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0).sum(axis=1) / known.sum(axis=1)  # type: ignore[no-any-return]
