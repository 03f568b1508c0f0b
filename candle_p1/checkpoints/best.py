"""Which epoch is the best so far, by a metric that should fall or rise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from candle_p1.errors import ParameterError, did_you_mean

FALLING = (
    *("loss", "error", "crossentropy", "hinge", "divergence", "poisson", "logcosh", "log_cosh"),
    *("mse", "mae", "mape", "msle", "rmse", "xent", "kld", "learning_rate"),
    *("false_positives", "false_negatives"),
)
RISING = (
    *("accuracy", "auc", "precision", "recall", "sensitivity", "specificity", "similarity"),
    *("corr", "correlation", "r2", "r2_score", "f1", "f1_score", "fbeta_score", "iou", "io_u"),
    *("true_positives", "true_negatives"),
)
"""Last words of the names of metrics, Keras's among them, that should fall and that should rise."""
SHORT = {"acc": "accuracy", "lr": "learning_rate"}
"""Names of CANDLE's Keras for today's."""


def is_rising(metric: str) -> bool | None:
    """Returns whether a metric should rise (accuracy, …) or fall (loss, …); None if unknown.

    Its name tells, which may be one of the validation (``val_``), and begin with an output's.
    """
    name = re.sub(r"_\d+$", "", long_name(metric))  # Keras numbers equal names
    for ends, rises in ((FALLING, False), (RISING, True)):
        if any(f"_{name}".endswith(f"_{end}") for end in ends):
            return rises
    return None


def long_name(metric: str) -> str:
    """Returns today's name of a metric: "acc" is "accuracy", also after "val_"."""
    validation = "val_" * metric.startswith("val_")
    name = metric.removeprefix("val_")
    return validation + SHORT.get(name, name)


def check_metric(metric: str, known: Iterable[str], parameter: str) -> None:
    """Checks that a run has the metric; `parameter` names what set it, for the message.

    Raises:
        ParameterError: It has not; the message names those that it has.
    """
    names = sorted(known)
    if long_name(metric) not in names:
        raise ParameterError(
            f"{parameter} = {metric!r} is not a metric of this run{did_you_mean(metric, names)};"
            f" its metrics are {', '.join(names)}"
        )


class Best:
    """The best value of a metric so far.

    Args:
        metric: The metric's name in the logs of an epoch; see `is_rising`.
        parameter: What names the metric to the user, for messages.

    Attributes:
        value: The best value; None before the first.

    Raises:
        ParameterError: The name does not say whether the metric should fall or rise.
    """

    def __init__(self, metric: str, parameter: str = "the metric of the best epoch") -> None:
        rises = is_rising(metric)
        if rises is None:
            raise ParameterError(
                f"{parameter}: cannot tell whether {metric!r} should fall or rise; use the loss, or"
                " one of Keras's metrics"
            )
        self.metric, self._rises = long_name(metric), rises
        self.value: float | None = None
        self._value_before: float | None = None
        self._parameter = parameter

    def improves(self, logs: Mapping[str, float]) -> bool:
        """Returns whether an epoch is the best so far, and remembers it; an equal one is not.

        A value that is not a finite number is never the best.

        Args:
            logs: The metrics of the epoch, by name; the same on every rank.

        Raises:
            ParameterError: The metric is not among them; the same on every rank.
        """
        try:
            check_metric(self.metric, logs, self._parameter)
        except ParameterError as error:
            raise error.on_all_ranks() from None
        value = float(logs[self.metric])
        if not isfinite(value):
            return False
        if self.value is not None and (value <= self.value if self._rises else value >= self.value):
            return False
        self._value_before, self.value = self.value, value
        return True

    def withdraw(self) -> None:
        """Takes back the best epoch, which could not be saved: the one before is the best again."""
        self.value = self._value_before

    def checkpoint_state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it, for JSON."""
        return {"metric": self.metric, "value": self.value}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `checkpoint_state` returned; from nothing if the metric is another."""
        if state["metric"] == self.metric:
            self.value = state["value"]
