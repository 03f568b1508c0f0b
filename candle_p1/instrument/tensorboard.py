"""Loss and metrics of every epoch for TensorBoard, which Keras writes by TensorFlow."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ParameterError

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.parameters.parameter_set import ParameterSet

DIRECTORY = "tensorboard"
NEEDED = ("tensorflow", "tensorboard")


def check_tensorboard(params: ParameterSet) -> None:
    """Raises ParameterError where logs for TensorBoard are asked for and cannot be written."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if params["tensorboard"] and missing:
        raise ParameterError(
            f"tensorboard True ({params.origin('tensorboard')}): Keras writes these logs by"
            f" TensorFlow, and {' and '.join(missing)} cannot be imported: install"
            " candle-p1[tensorflow-cpu], also where Keras runs on JAX, or leave --tensorboard out"
        )


def epoch_logs(directory: Path) -> Any:
    """Returns the Keras callback; it must come after those that write metrics into the logs.

    Args:
        directory: Where ``train/`` and ``validation/`` go.
    """
    import keras

    class EpochLogs(keras.callbacks.TensorBoard):  # type: ignore[misc]
        """Keras's callback without its work at every step, which is for other uses of it."""

        async_safe = True  # it reads no logs of a step, so Keras need not wait for the step

        def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
            """Does nothing."""

        def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
            """Does nothing."""

    return EpochLogs(str(directory), write_graph=False, update_freq="epoch", profile_batch=0)
