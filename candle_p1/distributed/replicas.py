"""Replicas: every rank has the same model, made equal before training and compared on demand.

The weights that gradients update stay equal by themselves. What no gradient updates is averaged
when it has to be equal, and the states of random layers always differ.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from candle_p1.distributed.comm import Communicator
from candle_p1.distributed.reducers.reducer import Reducer
from candle_p1.errors import DistributedError


def broadcast_state(model: Any, reducer: Reducer, root: int = 0) -> None:
    """Copies the root's weights and optimizer state to every rank, before training; collective.

    The optimizer must be built. Random states (of dropout, for example) are not copied, so ranks
    draw different numbers.
    """
    reducer.broadcast([*model.weights, *model.optimizer.variables], root)


def average_state(model: Any, comm: Communicator) -> dict[str, Any]:
    """Sets what no gradient updates, as the moving statistics of batches, to its mean over ranks.

    All ranks have trained on as many samples, so they weigh the same. Integers become rank 0's. The
    states of random layers are no weights, and stay each rank's own. Collective.

    Returns what this rank had instead, by name, for `restore_state`.
    """
    import keras

    replaced = {}
    for i, variable in enumerate(_averaged(model) if comm.size > 1 else ()):
        mine = np.array(keras.ops.convert_to_numpy(variable.value))
        if keras.backend.is_float_dtype(variable.dtype):
            total = comm.allreduce_sum(mine.astype(np.float64))
            shared = (total / comm.size).astype(mine.dtype)
        else:
            shared = comm.broadcast(mine)
        if not np.array_equal(mine, shared):
            replaced[f"layer/{i}"] = mine
            variable.assign(shared)
    return replaced


def restore_state(model: Any, replaced: Mapping[str, Any]) -> None:
    """Puts back what `average_state` has replaced on this rank; ignores other names."""
    for i, variable in enumerate(_averaged(model)):
        if (name := f"layer/{i}") in replaced:
            variable.assign(replaced[name])


def _averaged(model: Any) -> list[Any]:
    """Returns the weights that steps may change, but not gradients."""
    weights = model.non_trainable_weights
    return [weight for weight in weights if not getattr(weight, "is_constant", False)]


def seed_process(seed: int) -> None:
    """Seeds Python, NumPy and Keras, the same on every rank.

    Keras would also import and seed TensorFlow, whatever its own backend, which takes seconds and
    may take the memory of GPUs. With another backend, it finds none here; it remembers that.
    """
    import keras

    is_hidden = keras.backend.backend() != "tensorflow" and "tensorflow" not in sys.modules
    if is_hidden:
        sys.modules["tensorflow"] = None  # type: ignore[assignment]
    try:
        keras.utils.set_random_seed(seed)
    finally:
        if is_hidden:
            del sys.modules["tensorflow"]


def seed_ranks(model: Any, seed: int, rank: int, *position: int) -> None:
    """Derives the state of every random layer (dropout, noise) from seed, rank and layer.

    At a restart with other ranks, the position in the training makes it a new one.
    """
    for i, state in enumerate(seed_states(model)):
        derived = np.random.SeedSequence(seed, spawn_key=(rank, i, *position)).generate_state(2)
        state.assign(derived.astype(state.dtype))


def seed_states(model: Any) -> list[Any]:
    """Returns the states of the random layers, which differ between ranks: Keras variables."""
    return [v for v in model.variables if v.path.endswith("seed_generator_state")]


def check_equal(weights: Iterable[Any], comm: Communicator, when: str) -> None:
    """Raises DistributedError on all ranks if their Keras variables differ in a bit; collective."""
    import keras

    digest = hashlib.sha256()
    for weight in weights:
        digest.update(keras.ops.convert_to_numpy(weight.value).tobytes())
    different = comm.find_different(digest.hexdigest())
    if different:
        raise DistributedError(
            f"replicas differ after {when}: ranks"
            f" {', '.join(map(str, different))} have weights that differ from rank 0's"
        ).on_all_ranks()
