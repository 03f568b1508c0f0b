"""Changing float32 matrices in place: scaling, filling in missing values, joining.

If the ranks of a node share a matrix (candle_p1.data.shared), they change it together, each its
share of the columns or rows, and every function here is collective over the node. The result is
bit-identical to that of one process.

CANDLE fits the scaling to the training and the test samples together, and so does the default here,
for comparability; a fair test fits it to the training samples only. The results are those of
scikit-learn's scalers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.shared import allocate, sharers, writable
from candle_p1.distributed.comm import Communicator, SerialCommunicator
from candle_p1.errors import ParameterError
from candle_p1.instrument.phases import region
from candle_p1.scaling import share_bounds

Matrix = NDArray[np.float32]


ROWS_AT_A_TIME = 64  # bounds the temporaries of reductions to a few rows


def scale_features(
    scaling: str | None, *matrices: Matrix, fit_to: Sequence[Matrix] | None = None
) -> tuple[Matrix, Matrix]:
    """Scales the columns of all matrices in place, fitted to all of them together.

    Args:
        scaling: "maxabs" (to [-1, 1] by the largest absolute value), "minmax" (to [0, 1]), "std"
            (to mean 0 and standard deviation 1), or "none" or None. Constant columns are not
            divided.
        matrices: float32, shapes (rows, columns) with the same columns.
        fit_to: The matrices to fit to instead; they may be views of the others.

    Returns:
        What was subtracted from each column, and by what it was then divided: float32, shape
        (columns,), the same on every rank.

    Raises:
        ParameterError: No such scaling.
    """
    num_columns = matrices[0].shape[1]
    if scaling in (None, "none"):
        return np.zeros(num_columns, np.float32), np.ones(num_columns, np.float32)
    if scaling not in SCALINGS:
        raise ParameterError(f"unknown scaling {scaling!r}: choose one of {', '.join(SCALINGS)}")
    with region("scale"), _shared(*matrices) as share:
        columns = share(num_columns)
        mine = [writable(matrix)[:, columns] for matrix in matrices]
        fit_to_mine = mine if fit_to is None else [matrix[:, columns] for matrix in fit_to]
        offset, scale = _FITS[scaling](fit_to_mine)
        scale = np.where(scale == 0, np.float32(1), scale)
        for rows in _blocks(mine):
            rows -= offset
            rows /= scale
    offsets, scales = zip(*_node_of(*matrices).allgather((offset, scale)), strict=True)
    return np.concatenate(offsets), np.concatenate(scales)


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
    variance = squares / num_rows
    epsilon = np.finfo(np.float64).eps
    # As in scikit-learn: what rounding alone makes of a constant column is not its deviation.
    rounding = num_rows * epsilon * variance + (num_rows * mean * epsilon) ** 2
    variance[variance <= rounding] = 0
    return mean.astype(np.float32), np.sqrt(variance).astype(np.float32)


_FITS = {"maxabs": _fit_maxabs, "minmax": _fit_minmax, "std": _fit_std}
SCALINGS = (*_FITS, "none")


def change_rows(matrix: Matrix, change: Callable[[int, Matrix], None]) -> None:
    """Changes a matrix in place, some rows at a time.

    Args:
        matrix: Rows first, with any number of dimensions.
        change: Gets the number of the first row, and the rows, which it changes. The blocks do not
            depend on the number of ranks; random values must be derived from the row number.
    """
    with _shared(matrix) as share:
        num_blocks = -(-len(matrix) // ROWS_AT_A_TIME)
        rows = writable(matrix)
        for block in range(num_blocks)[share(num_blocks)]:
            start = block * ROWS_AT_A_TIME
            change(start, rows[start : start + ROWS_AT_A_TIME])


def fill_missing(matrix: Matrix) -> Matrix:
    """Replaces each NaN by the mean of its column, in place.

    Returns:
        A view of the matrix without the columns that are all NaN; the same as scikit-learn's
        ``SimpleImputer`` gives.
    """
    with _shared(matrix) as share:
        mine = writable(matrix)[:, share(matrix.shape[1])]
        sums, num_present = np.zeros(mine.shape[1]), np.zeros(mine.shape[1], np.int64)
        for rows in _blocks([mine]):
            present = ~np.isnan(rows)
            num_present += present.sum(axis=0)
            sums += np.where(present, rows, 0).sum(axis=0, dtype=np.float64)
        mean = (sums / np.maximum(num_present, 1)).astype(np.float32)
        for rows in _blocks([mine]):
            np.copyto(rows, mean, where=np.isnan(rows))
    counts = np.concatenate(sharers(matrix).allgather(num_present))
    keep = np.flatnonzero(counts)
    return matrix if len(keep) == len(counts) else order_columns(matrix, keep)


def order_columns(matrix: Matrix, columns: Sequence[int] | NDArray[np.int64]) -> Matrix:
    """Returns a view of a matrix that has these of its columns, in this order; changes it in place.

    Args:
        matrix: float32, shape (rows, columns).
        columns: The numbers of columns, each at most once.
    """
    with _shared(matrix) as share:
        for row in writable(matrix)[share(len(matrix))]:
            row[: len(columns)] = row[columns]
    return matrix[:, : len(columns)]


def join_rows(*parts: tuple[Matrix, NDArray[np.int64]]) -> Matrix:
    """Returns rows of several matrices side by side, shared if the first matrix is.

    A part is a matrix and the rows to take from it, int64, shape (rows,), the same number for each.
    """
    num_rows = len(parts[0][1])
    num_columns = sum(matrix.shape[1] for matrix, _ in parts)
    node = sharers(parts[0][0])
    joined = allocate((num_rows, num_columns), np.float32, node)
    begin, end = share_bounds(num_rows, node.rank, node.size)
    for start in range(begin, end, ROWS_AT_A_TIME):
        block = slice(start, min(start + ROWS_AT_A_TIME, end))
        first = 0
        for matrix, rows in parts:
            last = first + matrix.shape[1]
            joined.array[block, first:last] = matrix[rows[block]]
            first = last
    node.barrier()
    return joined.keep(num_rows)


@contextmanager
def _shared(*matrices: Matrix) -> Iterator[Callable[[int], slice]]:
    """Waits for the sharers before and after; yields a function that finds this rank's share."""
    node = _node_of(*matrices)
    node.barrier()
    yield lambda num: slice(*share_bounds(num, node.rank, node.size))
    node.barrier()


def _node_of(*matrices: Matrix) -> Communicator:
    return next((node for node in map(sharers, matrices) if node.size > 1), SerialCommunicator())


def _blocks(matrices: Sequence[Matrix]) -> list[Matrix]:
    return [
        matrix[start : start + ROWS_AT_A_TIME]
        for matrix in matrices
        for start in range(0, len(matrix), ROWS_AT_A_TIME)
    ]
