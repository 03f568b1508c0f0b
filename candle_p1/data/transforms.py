"""Feature scaling, in place on float32 matrices.

CANDLE fits the scaling on the training and the test samples together; so do these functions, for
comparability. The result is that of scikit-learn's scaler of the same kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from candle_p1.errors import ParameterError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]

ROWS_AT_A_TIME = 64  # bounds the temporaries of reductions to a few rows


def scale_features(scaling: str, *matrices: Matrix) -> None:
    """Scales the columns of all matrices in place, by what they hold together.

    Args:
        scaling: "maxabs" (to [-1, 1] by the largest absolute value), "minmax" (to [0, 1]), "std"
            (to mean 0 and standard deviation 1) or "none". A constant column is left unscaled.
        matrices: float32, shapes (rows, columns) with the same columns.

    Raises:
        ParameterError: No such scaling.
    """
    if scaling == "none":
        return
    if scaling == "maxabs":
        largest = np.zeros(matrices[0].shape[1], np.float32)
        for rows in _blocks(*matrices):
            np.maximum(largest, np.abs(rows).max(axis=0), out=largest)
        _apply(matrices, np.zeros_like(largest), largest)
    elif scaling == "minmax":
        low = np.full(matrices[0].shape[1], np.inf, np.float32)
        high = -low
        for rows in _blocks(*matrices):
            np.minimum(low, rows.min(axis=0), out=low)
            np.maximum(high, rows.max(axis=0), out=high)
        _apply(matrices, low, high - low)
    elif scaling == "std":
        num_rows = sum(len(matrix) for matrix in matrices)
        mean = np.zeros(matrices[0].shape[1])
        squares = np.zeros_like(mean)
        for rows in _blocks(*matrices):
            mean += rows.sum(axis=0, dtype=np.float64) / num_rows
        for rows in _blocks(*matrices):
            squares += ((rows - mean) ** 2).sum(axis=0)
        _apply(matrices, mean.astype(np.float32), np.sqrt(squares / num_rows).astype(np.float32))
    else:
        raise ParameterError(f"scaling {scaling!r}: choose one of {', '.join(SCALINGS)}")


SCALINGS = ("maxabs", "minmax", "std", "none")


def _apply(matrices: tuple[Matrix, ...], offset: Matrix, scale: Matrix) -> None:
    scale = np.where(scale == 0, np.float32(1), scale)
    for rows in _blocks(*matrices):
        rows -= offset
        rows /= scale


def _blocks(*matrices: Matrix) -> list[Matrix]:
    return [
        matrix[start : start + ROWS_AT_A_TIME]
        for matrix in matrices
        for start in range(0, len(matrix), ROWS_AT_A_TIME)
    ]
