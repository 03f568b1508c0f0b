"""One training in several calls of ``fit``: a continued run first ends the epoch it was in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from candle_p1.models.fast.batches import fit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.data.batches import TrainBatches
    from candle_p1.training.restart import Start


class TrainingInterrupted(Exception):  # noqa: N818
    """Ends training between two steps, on all ranks; only within this package."""


class TrainingCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of a training: each sees one training, however often ``fit`` is called.

    Args:
        callbacks: The callbacks; a ``keras.callbacks.History`` among them is the history.
        model: The compiled model.
        num_epochs: The number of epochs, with those that earlier parts have trained.
        num_steps: The steps of a whole epoch.
        begun: Called once, after the `on_train_begin` of all callbacks.
        resumed: Called once the epoch that goes on from a checkpoint has begun again.
        before_step: Called with the number of a step before all callbacks.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        model: Any,
        num_epochs: int,
        num_steps: int,
        *,
        begun: Callable[[], None] = lambda: None,
        resumed: Callable[[], None] = lambda: None,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        super().__init__(callbacks, model=model, verbose=0, epochs=num_epochs, steps=num_steps)
        self._begun, self._resumed, self._before_step = begun, resumed, before_step
        self._has_begun = False
        self._logs: dict[str, float] | None = None
        self.first_step = 0

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Begins training, unless an earlier call of ``fit`` has."""
        if not self._has_begun:
            self._has_begun = True
            super().on_train_begin(logs)
            self._begun()

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Begins an epoch, or goes on with one; ``fit`` has reset the metrics before."""
        super().on_epoch_begin(epoch, logs)
        if self.first_step:
            self._resumed()

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Begins a step, whose number counts from the beginning of the epoch."""
        step = self.first_step + batch
        self._before_step(step)
        super().on_train_batch_begin(step, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Ends a step."""
        super().on_train_batch_end(self.first_step + batch, logs)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Remembers the metrics for `finish`: ``fit`` may be called again."""
        self._logs = logs

    def finish(self) -> None:
        """Ends training; must be called once, after the last call of ``fit``."""
        super().on_train_end(self._logs)


def fit_from(
    model: Any, batches: TrainBatches, callbacks: TrainingCallbacks, start: Start, num_epochs: int
) -> bool:
    """Trains to the last epoch; returns whether training has not been interrupted.

    Args:
        model: The compiled model.
        batches: The training batches.
        callbacks: The callbacks, to which training has ended when this returns.
        start: Where training begins.
        num_epochs: The number of epochs, with those before the start.
    """
    options = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
    first, is_over = start.epoch, start.is_over
    if is_over:
        callbacks.on_train_begin()
    try:
        if start.step and not is_over:
            callbacks.first_step = batches.first_step = start.step
            fit(model, batches, range(first, first + 1), **options)
            callbacks.first_step = batches.first_step = 0
            first += 1
            is_over = model.stop_training or first == num_epochs
        if not is_over:
            fit(model, batches, range(first, num_epochs), **options)
        is_interrupted = False
    except TrainingInterrupted:
        is_interrupted = True
    callbacks.finish()
    return not is_interrupted
