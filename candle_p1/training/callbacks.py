"""Keras callbacks that measure training and show its progress, without communication."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

import keras

from candle_p1.instrument.epochs import Epoch

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.training.screen import Screen


class EpochTimer(keras.callbacks.Callback):  # type: ignore[misc]
    """Times the training part of every epoch, and its steps. Must come first in the list.

    Keras calls `on_epoch_end` only once the last step has finished, so the times are complete.

    Args:
        start_s: When the run began, by time.perf_counter.
        take_allreduce_times: Returns, for the steps since the last call, the time in which this
            rank waited for gradient allreduces and the time in which any was in progress, in s;
            None for both if that is not measured.

    Attributes:
        epochs: The epochs so far.
    """

    def __init__(
        self, start_s: float, take_allreduce_times: Callable[[], tuple[float | None, float | None]]
    ) -> None:
        super().__init__()
        self._start_s, self._take_allreduce_times = start_s, take_allreduce_times
        self.epochs: list[Epoch] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Starts timing the epoch."""
        self._begins: list[float] = []
        self._begin = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Records when the step begins."""
        self._begins.append(time.perf_counter())

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Adds the epoch to `epochs`."""
        end = time.perf_counter()
        begin_s, seconds = self._begin - self._start_s, end - self._begin
        steps_s = [later - earlier for earlier, later in pairwise([*self._begins, end])]
        self.epochs.append(Epoch(begin_s, seconds, steps_s, *self._take_allreduce_times()))


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows steps and epochs on a screen."""

    def __init__(self, screen: Screen, num_epochs: int, num_steps: int) -> None:
        super().__init__()
        self._screen, self._num_epochs, self._num_steps = screen, num_epochs, num_steps

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Shows the bar."""
        self._screen.begin_training(self._num_epochs, self._num_steps)

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Advances the bar."""
        self._screen.show_step(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Shows the epoch's metrics."""
        self._screen.show_epoch(epoch, logs or {})

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Removes the bar."""
        self._screen.end_training()
