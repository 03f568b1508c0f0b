"""Parses the bytes of a table into numbers; see csvkernel/table.h."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class Layout:
    """The layout of a table.

    Args:
        is_text: Whether each column is text.
        separator: One byte.
        missing: Words that stand for a missing number, which becomes NaN.
        empty_text: Whether text may be empty or one of these words, which may then have blanks
            around them.
    """

    def __init__(
        self,
        is_text: Sequence[bool],
        separator: str = ",",
        missing: Sequence[str] = (),
        empty_text: bool = False,
    ) -> None: ...

def uses_avx512() -> bool:
    """Returns whether numbers are parsed eight at a time.

    That takes a processor with AVX-512, and the variable ``CANDLE_P1_INSTRUCTIONS`` not set to
    older instructions.
    """

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
    """Parses the lines of text[start:stop] into the rows from `first_row` on, without the GIL.

    Args:
        text: The text.
        start: The byte at which a line begins.
        stop: The byte after the end of a line.
        layout: The layout of the lines.
        values: Takes the numbers; C-contiguous, shape (rows, columns of numbers).
        codes: Takes the index of each text among the distinct ones; shape (columns of text, rows).
        first_row: The row for the first line.

    Returns:
        The number of rows parsed; the distinct values of each column of text; and, for the first
        wrong line, its offset in the text in bytes, its number of fields, and the column (from 0)
        and content of its first wrong field, or None if no line is wrong. A line for which the
        arrays have no row counts as wrong.

    Raises:
        IndexError: The range is not in the text.
        ValueError: The arrays do not have the columns of the layout, or not the same rows.
    """
