"""Seeds: those of the process, and the states of random layers, which differ between ranks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


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
