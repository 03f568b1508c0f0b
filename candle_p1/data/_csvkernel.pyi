"""Bytes of a table to numbers; see csvkernel/table.h."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class Layout:
    """What a table looks like.

    Args:
        is_text: For each column, whether it holds text.
        separator: One byte.
        missing: Words that stand for a missing number, which becomes NaN.
        finite: Whether infinity and NaN are errors.
    """

    def __init__(
        self,
        is_text: Sequence[bool],
        separator: str = ",",
        missing: Sequence[str] = (),
        finite: bool = True,
    ) -> None: ...

def count_rows(text: NDArray[np.uint8], start: int, stop: int, layout: Layout) -> int:
    """Returns the number of lines in text[start:stop] that are not blank."""

def parse(
    text: NDArray[np.uint8],
    start: int,
    stop: int,
    layout: Layout,
    values: NDArray[np.float32] | NDArray[np.float64],
    codes: NDArray[np.int32],
    first_row: int,
) -> tuple[int, list[list[bytes]], tuple[int, int, int, bytes] | None]:
    """Parses the lines of text[start:stop] into the rows from `first_row` on; without the GIL.

    Args:
        text: Begins, at `start`, with a line.
        start: In bytes.
        stop: In bytes, after a line.
        layout: What the lines hold.
        values: Takes the numbers; C-contiguous, shape (rows, columns of numbers).
        codes: Takes each text's index into the distinct ones; shape (columns of text, rows).
        first_row: Where the first line goes.

    Returns:
        The rows parsed; the distinct values of each column of text; and, of the first line that
        does not fit, its place in the text in bytes, its number of fields, and column (from 0) and
        content of its first unfit field. None where all lines fit. A line for which the arrays have
        no row does not fit.

    Raises:
        IndexError: The range is not in the text.
        ValueError: The arrays do not have the layout's columns, or not the same rows.
    """
