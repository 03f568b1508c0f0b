"""When checkpoints are saved and which are kept, by CANDLE's rules; nothing here reads or writes.

The rules of saving are those of CANDLE's ``ckpt_utils.py`` (ECP-CANDLE/candle_lib): once there are
checkpoints at all, the end of an epoch is saved if the interval divides its number, if it is the
best so far, and if it is the last, but none before the epochs to skip. The interval in seconds and
the one in steps are additions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from candle_p1.checkpoints.best import Best
from candle_p1.parameters.catalog import INTERVALS
from candle_p1.parameters.parameter_set import ParameterSet


class EpochEnd(NamedTuple):
    """What to do at the end of an epoch: whether to save it, and whether it is the best so far."""

    save: bool
    best: bool


def are_saved(params: Mapping[str, Any]) -> bool:
    """Returns whether a run with these parameters saves checkpoints."""
    return any(params[name] for name in INTERVALS)


def check_flags(params: ParameterSet) -> list[str]:
    """Checks the parameters of checkpoints together; returns warnings.

    Raises:
        ParameterError: It is not known whether the metric of the best epoch should fall or rise.
    """
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

        Raises:
            ParameterError: It is not known whether the metric of the best epoch should fall or
                rise.
        """
        best = None
        if params["ckpt_save_best"]:
            origin = params.origin("ckpt_save_best_metric")
            best = Best(params["ckpt_save_best_metric"], f"ckpt_save_best_metric ({origin})")
        return cls(params["ckpt_save_interval"], params["ckpt_skip_epochs"], last_epoch, best)

    def after_epoch(self, epoch: int, logs: Mapping[str, float]) -> EpochEnd:
        """Returns whether the end of an epoch, numbered from 1, is saved; called once for each.

        Raises:
            ParameterError: The metric of the best epoch is not among them; on every rank.
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
            newest_first = [each for each in newest_first if _is_spaced(each, newest_first[0])]
        return set(newest_first[:limit])

    return keep


def _is_spaced(number: int, newest: int) -> bool:
    """Returns whether a number is one of the two newest multiples of a power of two."""
    k = (number & -number).bit_length() - 1  # 2^k is the largest one that divides the number
    return number >= ((newest >> k) - 1) << k
