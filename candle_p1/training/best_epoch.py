"""Early stopping: when it ends training, and the best epoch, whose model is kept."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan, nan
from typing import Any

import keras
from numpy.typing import NDArray

STATE = ("best", "best_epoch", "stopped_epoch", "wait")


class BestEpoch(keras.callbacks.EarlyStopping):  # type: ignore[misc]
    """Ends training when the validation loss no longer falls; the best epoch's weights return.

    Every rank has a copy of these weights, which is a part of checkpoints. The validation loss is
    the same on all ranks, and so is what they do.

    Args:
        model: The model; after an epoch, its weights are the same on all ranks.
        patience: The epochs to wait for a lower validation loss.
        weights: The weights of the best epoch before this segment of the run, if it has others.

    Attributes:
        weights: The weights after the best epoch so far, in the order of the model's.
    """

    weights: list[NDArray[Any]]

    def __init__(
        self, model: Any, patience: int, weights: list[NDArray[Any]] | None = None
    ) -> None:
        super().__init__("val_loss", patience=patience)
        self.weights = weights or model.get_weights()

    @property
    def number(self) -> int | None:
        """The number of the best epoch, from 1; None before the first epoch has ended."""
        return None if self.best is None else self.best_epoch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Keeps the weights if the epoch is the best so far, else maybe ends training."""
        value = (logs or {}).get("val_loss", nan)
        super().on_epoch_end(epoch, {"val_loss": inf if isnan(value) else value})
        if self.number == epoch + 1:
            self.weights = self.model.get_weights()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Gives the model the weights of the best epoch."""
        if self.number:
            self.model.set_weights(self.weights)

    def checkpoint_state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps besides the weights, for JSON."""
        return {name: getattr(self, name) for name in STATE}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `checkpoint_state` returned."""
        for name in STATE:
            setattr(self, name, state[name])
