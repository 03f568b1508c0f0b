"""What layers keep of their own while a model trains, such as the moving statistics of batches.

No gradient says how it changes, so each rank's follows from the samples of this rank alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from candle_p1.distributed.comm import Communicator


def average_state(model: Any, comm: Communicator) -> dict[str, NDArray[Any]]:
    """Sets the state of layers to its mean over ranks, on every rank; collective.

    It is that of all weights that no gradient updates. All ranks have trained on as many samples,
    so they weigh the same. What is no floating-point number, such as a counter, becomes rank 0's.
    The states of random layers are no weights, and stay each rank's own.

    Returns:
        What this rank had instead, by name, for `restore_state`.
    """
    replaced: dict[str, NDArray[Any]] = {}
    for name, variable in _named(model) if comm.size > 1 else ():
        mine = np.array(keras.ops.convert_to_numpy(variable.value))
        if keras.backend.is_float_dtype(variable.dtype):
            mean = comm.allreduce_sum(mine.astype(np.float64)) / comm.size
            shared = np.asarray(mean).astype(mine.dtype)
        else:
            shared = comm.broadcast(mine)
        if not np.array_equal(mine, shared):
            replaced[name] = mine
            variable.assign(shared)
    return replaced


def restore_state(model: Any, replaced: Mapping[str, NDArray[Any]]) -> None:
    """Puts back what `average_state` has replaced on this rank; other names are ignored."""
    for name, variable in _named(model):
        if name in replaced:
            variable.assign(replaced[name])


def _named(model: Any) -> list[tuple[str, Any]]:
    return [(f"layer/{i}", weight) for i, weight in enumerate(model.non_trainable_weights)]
