"""Feature scaling, in place on float32 matrices.

CANDLE fits the scaling to the training and the test samples together, which is the default here,
for comparability; what is learned from the training samples alone is the honest way. The result is
that of scikit-learn's scaler of the same kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from candle_p1.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]

ROWS_AT_A_TIME = 64  # bounds the temporaries of reductions to a few rows


def scale_features(scaling: str, *matrices: Matrix, fit_to: Sequence[Matrix] | None = None) -> None:
    """Scales the columns of all matrices in place, by what they hold together.

    Args:
        scaling: "maxabs" (to [-1, 1] by the largest absolute value), "minmax" (to [0, 1]), "std"
            (to mean 0 and standard deviation 1) or "none". A constant column is left unscaled.
        matrices: float32, shapes (rows, columns) with the same columns.
        fit_to: Scale by what these matrices hold instead; they may be views of the others.

    Raises:
        ParameterError: No such scaling.
    """
    if scaling == "none":
        return
    if scaling not in SCALINGS:
        raise ParameterError(f"scaling {scaling!r}: choose one of {', '.join(SCALINGS)}")
    offset, scale = _FITS[scaling](matrices if fit_to is None else fit_to)
    scale = np.where(scale == 0, np.float32(1), scale)
    for rows in _blocks(matrices):
        rows -= offset
        rows /= scale


def _fit_maxabs(matrices: Sequence[Matrix]) -> tuple[Matrix, Matrix]:
    largest = np.zeros(matrices[0].shape[1], np.float32)
    for rows in _blocks(matrices):
        np.maximum(largest, np.abs(rows).max(axis=0), out=largest)
    return np.zeros_like(largest), largest


def _fit_minmax(matrices: Sequence[Matrix]) -> tuple[Matrix, Matrix]:
    low = np.full(matrices[0].shape[1], np.inf, np.float32)
    high = -low
    for rows in _blocks(matrices):
        np.minimum(low, rows.min(axis=0), out=low)
        np.maximum(high, rows.max(axis=0), out=high)
    return low, high - low


def _fit_std(matrices: Sequence[Matrix]) -> tuple[Matrix, Matrix]:
    num_rows = sum(len(matrix) for matrix in matrices)
    mean = np.zeros(matrices[0].shape[1])
    squares = np.zeros_like(mean)
    for rows in _blocks(matrices):
        mean += rows.sum(axis=0, dtype=np.float64) / num_rows
    for rows in _blocks(matrices):
        squares += ((rows - mean) ** 2).sum(axis=0)
    return mean.astype(np.float32), np.sqrt(squares / num_rows).astype(np.float32)


_FITS = {"maxabs": _fit_maxabs, "minmax": _fit_minmax, "std": _fit_std}
SCALINGS = (*_FITS, "none")


def fill_missing(matrix: Matrix) -> Matrix:
    """Returns the matrix with the mean of its column in place of NaN, without empty columns.

    In place where no column is empty. The same as scikit-learn's ``SimpleImputer`` of means.
    """
    present = ~np.isnan(matrix)
    num_present = present.sum(axis=0)
    if not num_present.all():
        keep = num_present > 0
        matrix, present, num_present = matrix[:, keep], present[:, keep], num_present[keep]
    sums = np.where(present, matrix, 0).sum(axis=0, dtype=np.float64)
    mean = (sums / num_present).astype(np.float32)
    np.copyto(matrix, mean, where=~present)
    return matrix


def _blocks(matrices: Sequence[Matrix]) -> list[Matrix]:
    return [
        matrix[start : start + ROWS_AT_A_TIME]
        for matrix in matrices
        for start in range(0, len(matrix), ROWS_AT_A_TIME)
    ]
