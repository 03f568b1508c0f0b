"""When checkpoints are saved and which are kept, by CANDLE's rules; nothing here reads or writes.

The rules of saving are those of CANDLE's ``ckpt_utils.py`` (ECP-CANDLE/candle_lib): once there are
checkpoints at all, the end of an epoch is saved if the interval divides its number, if it is the
best so far, and if it is the last, but none before the epochs to skip. The interval in seconds and
the one in steps are additions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.parameters.catalog import INTERVALS
from candle_p1.parameters.parameter_set import ParameterSet

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
    """Raises ParameterError, which names the metrics of the run, if it lacks this one.

    `parameter` names what set it, for the message.
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


class EpochEnd(NamedTuple):
    """What to do at the end of an epoch: whether to save it, and whether it is the best so far."""

    save: bool
    best: bool


def are_saved(params: Mapping[str, Any]) -> bool:
    """Returns whether a run with these parameters saves checkpoints."""
    return any(params[name] for name in INTERVALS)


def check_flags(params: ParameterSet) -> list[str]:
    """Checks the parameters of checkpoints together; returns warnings, or as `SavePolicy.of`."""
    if not are_saved(params):
        return []
    SavePolicy.of(params, last_epoch=1)
    warnings = []
    if params["ckpt_skip_epochs"] > params["epochs"]:
        warnings.append(
            f"ckpt_skip_epochs ({params.origin('ckpt_skip_epochs')}): the run has"
            f" {params['epochs']} epochs, so no checkpoint is saved"
        )
    if params["ckpt_save_weights_only"]:
        warnings.append(
            f"ckpt_save_weights_only ({params.origin('ckpt_save_weights_only')}): a run that"
            " restarts from these checkpoints begins with a new optimizer, and does not end as it"
            " would have without the interruption"
        )
    return warnings


@dataclass
class SavePolicy:
    """Which ends of epochs are saved. It is the same on every rank, and decides the same there."""

    interval: int  # saves the epochs whose numbers it divides; 0: none for this reason
    skip_epochs: int  # saves no epoch with a smaller number
    last_epoch: int
    best: Best | None = None  # None if it does not matter which epoch is the best

    @classmethod
    def of(cls, params: ParameterSet, last_epoch: int) -> SavePolicy:
        """Returns the policy of a run that saves checkpoints.

        Raises ParameterError if it is not known whether the metric of the best epoch should fall.
        """
        best = None
        if params["ckpt_save_best"]:
            origin = params.origin("ckpt_save_best_metric")
            best = Best(params["ckpt_save_best_metric"], f"ckpt_save_best_metric ({origin})")
        return cls(params["ckpt_save_interval"], params["ckpt_skip_epochs"], last_epoch, best)

    def after_epoch(self, epoch: int, logs: Mapping[str, float]) -> EpochEnd:
        """Returns whether the end of an epoch, numbered from 1, is saved; called once for each.

        Raises ParameterError as `Best.improves`.
        """
        if not self.allows(epoch):
            return EpochEnd(save=False, best=False)
        is_best = self.best is not None and self.best.improves(logs)
        is_due = self.interval > 0 and epoch % self.interval == 0
        return EpochEnd(is_best or is_due or epoch == self.last_epoch, is_best)

    def allows(self, num_epochs: int) -> bool:
        """Returns whether anything is saved after so many complete epochs, in the next one, too."""
        return num_epochs >= self.skip_epochs

    def checkpoint_state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it, for JSON."""
        return {} if self.best is None else {"best": self.best.checkpoint_state()}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `checkpoint_state` returned, maybe with other parameters."""
        if self.best is not None and "best" in state:
            self.best.restore_state(state["best"])


def keep_policy(mode: str, limit: int | None) -> Callable[[Collection[int]], set[int]]:
    """Returns which of a run's checkpoints to keep beside the best, as a function of their numbers.

    "linear" keeps the newest ones. "exponential" keeps fewer, the older they are. The age of a
    checkpoint is the number of those that were saved after it; for every power of two 2^k, one is
    kept whose age is at least 2^k and less than 2^(k+1), and the number of checkpoints grows with
    the logarithm of how many were saved. For that, those are kept whose number is one of the two
    newest multiples of a power of two. After 16 checkpoints, for example, the ages 0, 1, 2, 4 and 8
    are left. One that is removed would not be kept later either.

    Args:
        mode: "linear" or "exponential".
        limit: The maximum number of checkpoints; the newest ones count. None: with "linear" 2, one
            of which may be damaged; with "exponential" no limit.
    """
    if limit is None and mode == "linear":
        limit = 2

    def keep(numbers: Collection[int]) -> set[int]:
        newest_first = sorted(numbers, reverse=True)
        if mode == "exponential":
            powers = [(n, (n & -n).bit_length() - 1) for n in newest_first]  # 2^k divides n
            newest_first = [n for n, k in powers if n >= ((newest_first[0] >> k) - 1) << k]
        return set(newest_first[:limit])

    return keep
