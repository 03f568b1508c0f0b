"""A profile of some training steps, by the backend's own profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from pathlib import Path

FIRST_STEP = 2  # the first steps compile and allocate
NUM_STEPS = 10


class StepProfiler(keras.callbacks.Callback):  # type: ignore[misc]
    """Profiles ten steps of this rank, or as many as there are after the first two.

    The profile can be opened with TensorBoard or XProf. Profiling slows the steps.

    Args:
        directory: Where the profile goes.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._step = 0
        self._running = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Starts at the first step to be profiled, ends after the last."""
        if self._step == FIRST_STEP:
            _profiler().start_trace(str(self._directory))
            self._running = True
        elif self._step == FIRST_STEP + NUM_STEPS:
            self._stop()
        self._step += 1

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Ends, where there were fewer steps."""
        self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            _profiler().stop_trace()


class _TensorFlowProfiler:
    """TensorFlow's profiler under the names that JAX's has."""

    @staticmethod
    def start_trace(directory: str) -> None:
        import tensorflow as tf

        tf.profiler.experimental.start(directory)

    @staticmethod
    def stop_trace() -> None:
        import tensorflow as tf

        tf.profiler.experimental.stop()


def _profiler() -> Any:
    if keras.backend.backend() == "jax":
        import jax

        return jax.profiler
    return _TensorFlowProfiler
