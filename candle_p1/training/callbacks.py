"""Keras callbacks that measure training and show its progress. They communicate with no one."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

import keras

from candle_p1.instrument.epochs import Epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from candle_p1.training.screen import Screen


class EpochTimer(keras.callbacks.Callback):  # type: ignore[misc]
    """Times the training part of every epoch, and its steps. Must come first in the list.

    Keras hands the epoch's metrics over only when its last step is done, so the time is complete.

    Args:
        start_s: When the run began, by time.perf_counter.
        take_allreduce_times: Returns, for the steps since the last call, the time in which this
            rank waited for gradient allreduces and the time in which any was in progress, in s;
            None for both if that is not measured.

    Attributes:
        epochs: The epochs so far.
    """

    async_safe = True  # it reads no logs of a step, so Keras need not wait for the step

    def __init__(
        self, start_s: float, take_allreduce_times: Callable[[], tuple[float | None, float | None]]
    ) -> None:
        super().__init__()
        self._start_s, self._take_allreduce_times = start_s, take_allreduce_times
        self.epochs: list[Epoch] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Starts the clock."""
        self._begins: list[float] = []
        self._begin = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Notes the time."""
        self._begins.append(time.perf_counter())

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Stops the clock."""
        end = time.perf_counter()
        begin_s, seconds = self._begin - self._start_s, end - self._begin
        steps_s = [later - earlier for earlier, later in pairwise([*self._begins, end])]
        self.epochs.append(Epoch(begin_s, seconds, steps_s, *self._take_allreduce_times()))


class BeforeEpoch(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a function with the number of each epoch, from 0, before it begins."""

    def __init__(self, call: Callable[[int], None]) -> None:
        super().__init__()
        self._call = call

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Calls it."""
        self._call(epoch)


class AfterEpoch(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a function with the metrics of each epoch that callbacks before this one have put."""

    def __init__(self, call: Callable[[Mapping[str, float]], None]) -> None:
        super().__init__()
        self._call = call

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Calls it."""
        self._call(logs or {})


class BeforeStep(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a function before every step."""

    async_safe = True  # it reads no logs of a step, so Keras need not wait for the step

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Calls it."""
        self._call()


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows steps and epochs on a screen."""

    async_safe = True  # it reads no logs of a step, so Keras need not wait for the step

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
        """Takes the bar away."""
        self._screen.end_training()
