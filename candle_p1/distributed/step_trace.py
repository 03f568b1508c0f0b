"""A trace of some training steps, made with the profiler of the framework that Keras runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DIRECTORY = "step_trace"
FIRST_STEP = 2  # the first steps compile and allocate
NUM_STEPS = 10


class StepTracer(keras.callbacks.Callback):  # type: ignore[misc]
    """Traces ten steps of this rank, after the first two, or as many as there are.

    TensorBoard and XProf open the trace. Tracing slows the steps down.

    Args:
        directory: Where the trace goes.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._start_profiler, self._stop_profiler = _profiler()
        self._step = 0
        self._running = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Starts the trace before the first step to be traced, and ends it after the last."""
        if self._step == FIRST_STEP:
            self._start_profiler(str(self._directory))
            self._running = True
        elif self._step == FIRST_STEP + NUM_STEPS:
            self._stop()
        self._step += 1

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Ends the trace if training was shorter."""
        self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            self._stop_profiler()


def _profiler() -> tuple[Callable[[str], None], Callable[[], None]]:
    """Returns the functions that start and stop the framework's profiler."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.profiler.start_trace, jax.profiler.stop_trace
    import tensorflow as tf

    return tf.profiler.experimental.start, tf.profiler.experimental.stop
