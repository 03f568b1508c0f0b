"""Scores of predictions, kept as sums over samples, which can be added up over ranks.

Each rank updates a score with its share of the predictions, in batches. With the sums of all ranks
added, the result is what one process would compute from all samples. Sums may have further axes in
front, such as one for the draws of a bootstrap; results then have these axes, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.errors import ParameterError

CONSTANT = 1e-12
"""Values whose variance is a smaller share of their mean square differ by rounding only."""
LEAST_PROBABILITY = 1e-7
"""As in Keras's cross-entropy: a class that was excluded costs 16.1, not infinity."""
SIGMOID_RANGE = float(np.finfo(np.float32).tiny), 1 - 2**-24
"""The sigmoids that float32 can hold and that have finite odds."""


def last_activation(model: Any) -> str:
    """Returns the name of the activation of a Keras model's last layer; "" if it has none."""
    return getattr(getattr(model.layers[-1], "activation", None), "__name__", "")


def as_probabilities(outputs: Any, activation: str) -> NDArray[np.float64]:
    """Returns a model's outputs as probabilities of classes, whose sum is 1 for each sample.

    They are what a categorical cross-entropy takes them for: of sigmoids, the softmax of what the
    sigmoids were computed from, and others divided by their sum. The activation is that of
    `last_activation`.

    Raises:
        ParameterError: They are not those of at least two classes.
    """
    shape = getattr(outputs, "shape", None)
    if shape is None or len(shape) != 2 or shape[1] < 2:
        raise ParameterError(
            f"the network returns {shape or 'several arrays'}, not a value for each of 2 or more"
            " classes: the benchmark must name a target (Inputs.target) or, for predictions, define"
            " its own predictor"
        )
    if activation == "softmax":
        return np.asarray(outputs, np.float64)
    values = np.maximum(outputs.astype(np.float64), 0)
    if activation == "sigmoid":
        values = np.clip(values, *SIGMOID_RANGE)
        values = values / (1 - values)
    sums = values.sum(axis=1, keepdims=True)
    return np.divide(values, sums, out=np.full(values.shape, 1 / values.shape[1]), where=sums > 0)


class RegressionScore:
    """Mean squared error, coefficient of determination and correlation of predicted values.

    - mse: over all values;
    - r2: of each output, averaged over outputs, as in ``sklearn.metrics.r2_score`` (a constant
      output counts as 1 if it is predicted exactly, else as 0);
    - correlation: Pearson's, over all values.
    """

    def __init__(self, num_outputs: int) -> None:
        # For each output: samples; sums of true and predicted values, of their squares, of their
        # product and of the squared error.
        self.sums = np.zeros((7, num_outputs))

    def update(self, y_true: Any, y_pred: Any) -> None:
        """Adds a batch; both shapes (samples, …)."""
        true = np.asarray(y_true, np.float64).reshape(-1, self.sums.shape[1])
        predicted = np.asarray(y_pred, np.float64).reshape(-1, self.sums.shape[1])
        self.sums[0] += len(true)
        self.sums[1] += true.sum(axis=0)
        self.sums[2] += predicted.sum(axis=0)
        self.sums[3] += np.einsum("so,so->o", true, true)
        self.sums[4] += np.einsum("so,so->o", predicted, predicted)
        self.sums[5] += np.einsum("so,so->o", true, predicted)
        error = predicted - true
        self.sums[6] += np.einsum("so,so->o", error, error)

    def of_constant(self, predicted: Any) -> RegressionScore:
        """Returns the score, over the same samples, of always predicting these values.

        `predicted` has the shape of the targets of one sample.
        """
        score = RegressionScore(self.sums.shape[1])
        num_samples, true, _, true2, *_ = self.sums
        p = np.asarray(predicted, np.float64).reshape(-1)
        p2, tp = num_samples * p**2, true * p
        score.sums[:] = num_samples, true, num_samples * p, true2, p2, tp, true2 - 2 * tp + p2
        return score

    def result(self) -> dict[str, Any]:
        """Returns mse, r2 and correlation."""
        num_samples, true, _, true2, _, _, error2 = np.moveaxis(self.sums, -2, 0)
        with np.errstate(divide="ignore", invalid="ignore"):  # of no samples
            total = true2 - true**2 / num_samples
            constant = total <= CONSTANT * true2
            ratio = np.divide(error2, total, out=np.zeros_like(total), where=~constant)
            r2 = np.where(constant, error2 == 0, 1 - ratio)
            n, t, p, t2, p2, tp, e2 = np.moveaxis(self.sums.sum(axis=-1), -1, 0)
            of_true, of_predicted = t2 / n - (t / n) ** 2, p2 / n - (p / n) ** 2
            vary = (of_true * n > CONSTANT * t2) & (of_predicted * n > CONSTANT * p2)
            covariance = tp / n - t / n * p / n
            correlation = np.where(vary, covariance / np.sqrt(of_true * of_predicted), np.nan)
            found = {"mse": e2 / n, "r2": r2.mean(axis=-1), "correlation": correlation}
        return {name: value if value.ndim else float(value) for name, value in found.items()}


class ConfusionScore:
    """Accuracy, and precision and recall of each class, from predicted class probabilities.

    Attributes:
        sums: int64, shape (classes, classes): samples by true and predicted class; or float64.
    """

    def __init__(self, num_classes: int) -> None:
        self.sums: NDArray[Any] = np.zeros((num_classes, num_classes), np.int64)

    def update(self, y_true: Any, y_pred: Any) -> None:
        """Adds a batch.

        Args:
            y_true: The number of each sample's class, shape (samples,) or (samples, 1); or shape
                (samples, classes), where the largest entry marks the class.
            y_pred: Shape (samples, classes); the largest entry marks the predicted class.
        """
        true = np.asarray(y_true)
        one_hot = true.ndim > 1 and true.shape[1] > 1
        classes = np.argmax(true, axis=1) if one_hot else true.reshape(-1).astype(np.int64)
        np.add.at(self.sums, (classes, np.argmax(y_pred, axis=1)), 1)

    def of_constant(self, predicted: int) -> ConfusionScore:
        """Returns the score, over the same samples, of always predicting this class."""
        score = ConfusionScore(len(self.sums))
        score.sums[:, predicted] = self.sums.sum(axis=1)
        return score

    def result(self) -> dict[str, Any]:
        """Returns accuracy and macro_f1, the mean F1 score of the classes, true or predicted.

        Classes that are neither do not count, as in ``sklearn.metrics.f1_score``.
        """
        hits, total = np.trace(self.sums, axis1=-2, axis2=-1), self.sums.sum(axis=(-2, -1))
        num_classes = (self.sums.sum(axis=-2) + self.sums.sum(axis=-1) > 0).sum(axis=-1)
        with np.errstate(invalid="ignore"):  # of no samples
            macro_f1 = self.per_class()["f1"].sum(axis=-1) / num_classes
            found = {"accuracy": hits / total, "macro_f1": macro_f1}
        return {name: value if value.ndim else float(value) for name, value in found.items()}

    def per_class(self) -> dict[str, NDArray[Any]]:
        """Returns precision, recall, f1 and num_samples of each class; 0 where there are none."""
        hits = np.diagonal(self.sums, axis1=-2, axis2=-1).astype(np.float64)
        predicted, actual = self.sums.sum(axis=-2), self.sums.sum(axis=-1)
        return {
            "precision": _ratio(hits, predicted),
            "recall": _ratio(hits, actual),
            "f1": _ratio(2 * hits, predicted + actual),
            "num_samples": actual,
        }


def _ratio(numerator: NDArray[Any], denominator: NDArray[Any]) -> NDArray[np.float64]:
    return np.divide(
        numerator, denominator, out=np.zeros(numerator.shape), where=np.asarray(denominator) > 0
    )
