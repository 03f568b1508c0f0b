"""The states of random layers, which differ between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np


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
