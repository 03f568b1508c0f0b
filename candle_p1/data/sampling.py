"""Random choices: those of CANDLE's code reproduced, and independent random streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def pandas_sample(num_rows: int, fraction: float, seed: int) -> NDArray[np.int64]:
    """Returns the rows that ``DataFrame.sample(frac=fraction, random_state=seed)`` takes, in order.

    CANDLE uses it to shuffle (fraction 1) and to sample. int64, shape (rows taken,).
    """
    random = np.random.RandomState(seed)  # the generator that pandas uses for an integer seed
    return random.choice(num_rows, size=round(fraction * num_rows), replace=False).astype(np.int64)


def random_stream(seed: int, *key: int) -> np.random.Generator:
    """Returns a random generator for one purpose; different keys give independent streams."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
