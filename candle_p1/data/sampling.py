"""Random choices as CANDLE's code makes them, so that the same files give the same split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def pandas_sample(num_rows: int, fraction: float, seed: int) -> NDArray[np.int64]:
    """Returns the rows that ``DataFrame.sample(frac=fraction, random_state=seed)`` takes, in order.

    CANDLE shuffles by it (fraction 1) and thins out; int64, shape (rows taken,).
    """
    random = np.random.RandomState(seed)  # the generator that pandas uses for an integer seed
    return random.choice(num_rows, size=round(fraction * num_rows), replace=False).astype(np.int64)
