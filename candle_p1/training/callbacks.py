"""Keras callbacks that measure training and show its progress, without communication."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from candle_p1.files import write_atomically
from candle_p1.instrument.epochs import Epoch, sum_of_known

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
        epochs: The epochs that this part of the run has ended.
    """

    def __init__(
        self, start_s: float, take_allreduce_times: Callable[[], tuple[float | None, float | None]]
    ) -> None:
        super().__init__()
        self._start_s, self._take_allreduce_times = start_s, take_allreduce_times
        self._earlier: Epoch | None = None
        self._first_step: int | None = 0
        self.epochs: list[Epoch] = []

    def resume(self, earlier: Epoch) -> None:
        """Counts the steps of the first epoch that an earlier part of the run has trained."""
        self._earlier = earlier

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Starts timing the epoch."""
        self._begins: list[float] = []
        self._taken: list[tuple[float | None, float | None]] = []
        self._begin = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Records when the step begins."""
        self._begins.append(time.perf_counter())

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Adds the epoch to `epochs`."""
        self.epochs.append(self.so_far())
        self._earlier = self._first_step = None

    def so_far(self) -> Epoch:
        """Returns the current epoch, as far as its steps have ended."""
        now = time.perf_counter()
        self._taken.append(self._take_allreduce_times())  # those since the last call
        exposed_s, allreduce_s = map(sum_of_known, zip(*self._taken, strict=True))
        steps_s = [later - earlier for earlier, later in pairwise([*self._begins, now])]
        passed = Epoch(
            self._begin - self._start_s,
            now - self._begin,
            steps_s,
            exposed_s,
            allreduce_s,
            self._first_step,
        )
        return passed if self._earlier is None else passed.after(self._earlier)


class EpochTable(keras.callbacks.CSVLogger):  # type: ignore[misc]
    """Writes the metrics of every epoch into a CSV file, as Keras does.

    A continued run begins with the file as it was at the checkpoint.
    """

    csv_file: Any

    def checkpoint_state(self) -> dict[str, str]:
        """Returns the text of the file."""
        return {"text": Path(self.filename).read_bytes().decode()}

    def restore_state(self, state: dict[str, str]) -> None:
        """Writes the text, after which later epochs follow."""
        self.csv_file.close()
        path = Path(self.filename)
        write_atomically(path, state["text"])
        self.csv_file = path.open("a", encoding="utf-8", newline="")
        self.append_header = not state["text"]


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows steps and epochs on a screen; a continued run begins with `first_epoch`, from 0."""

    def __init__(
        self, screen: Screen, num_epochs: int, num_steps: int, first_epoch: int = 0
    ) -> None:
        super().__init__()
        self._screen, self._num_epochs, self._num_steps = screen, num_epochs, num_steps
        self._first_epoch = first_epoch

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Shows the bar."""
        self._screen.begin_training(self._num_epochs, self._num_steps, self._first_epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Advances the bar."""
        self._screen.show_step(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Shows the epoch's metrics."""
        self._screen.show_epoch(epoch, logs or {})

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Removes the bar."""
        self._screen.end_training()
