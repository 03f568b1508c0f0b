"""Loss and metrics of every epoch for TensorBoard; Keras writes these logs with TensorFlow."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from candle_p1.errors import ParameterError
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


def _files(directory: Path) -> dict[str, Path]:
    files = directory.glob("*/events.out.*")
    return {str(path.relative_to(directory)): path for path in files}


def epoch_logs(directory: Path, *, is_continued: bool = False) -> Any:
    """Returns a Keras callback that must come after those that write metrics into the logs.

    A run that continues from a checkpoint cuts the files back to it; another one removes them. The
    directory is the parent of ``train/`` and ``validation/``.
    """
    import keras

    earlier = _files(directory)

    class EpochLogs(keras.callbacks.TensorBoard):  # type: ignore[misc]
        """Keras's callback, without what it does in every step, which is not needed here."""

        # Not overridden: whoever reads the logs of a step waits for it.
        on_train_batch_end = keras.callbacks.Callback.on_train_batch_end

        def checkpoint_state(self) -> dict[str, int]:
            """Returns the sizes of the files."""
            for writer in self._writers.values():
                writer.flush()
            return {name: path.stat().st_size for name, path in _files(directory).items()}

        def restore_state(self, sizes: dict[str, int]) -> None:
            """Cuts the files of earlier segments back to their sizes."""
            for name, path in earlier.items():
                if name in sizes:
                    os.truncate(path, sizes[name])
                else:
                    path.unlink()

        on_train_batch_begin = keras.callbacks.Callback.on_train_batch_begin

    logs = EpochLogs(str(directory), write_graph=False, update_freq="epoch", profile_batch=0)
    if not is_continued:
        logs.restore_state({})
    return logs
