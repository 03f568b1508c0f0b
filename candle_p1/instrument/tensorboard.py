"""Loss and metrics of every epoch for TensorBoard; Keras writes these logs with TensorFlow."""

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
    """Raises ParameterError if logs for TensorBoard are requested and cannot be written."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if params["tensorboard"] and missing:
        raise ParameterError(
            f"tensorboard True ({params.origin('tensorboard')}): Keras writes these logs with"
            f" TensorFlow, but {' and '.join(missing)} cannot be imported: install"
            " candle-p1[tensorflow-cpu], which is needed with JAX, too, or omit --tensorboard"
        )


def epoch_logs(directory: Path) -> Any:
    """Returns a Keras callback that must come after those that write metrics into the logs.

    Args:
        directory: The parent of ``train/`` and ``validation/``.
    """
    import keras

    class EpochLogs(keras.callbacks.TensorBoard):  # type: ignore[misc]
        """Keras's callback, without what it does in every step, which is not needed here."""

        async_safe = True  # it does not read the logs of a step, so Keras need not wait for them

        def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
            """Does nothing."""

        def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
            """Does nothing."""

    return EpochLogs(str(directory), write_graph=False, update_freq="epoch", profile_batch=0)
