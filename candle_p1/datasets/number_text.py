"""Formatting rows of numbers as text, digit by digit for whole arrays at once.

Formatting the hundred million values of a synthetic file one by one would take minutes; this takes
seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_SCALED = 2**32 - 1
"""The largest value times 10^decimals."""


def format_rows(
    prefixes: Sequence[bytes],
    values: NDArray[Any],
    *,
    decimals: int,
    separator: bytes = b",",
    strip_zeros: bool = False,
    missing: bytes = b"",
) -> bytes:
    """Returns a line for each row: its prefix, then the separator and the value of each column.

    Args:
        prefixes: The beginning of each line; after b"" there is no separator.
        values: Finite numbers, or NaN, shape (rows, columns); rounded to `decimals`, half to even.
        decimals: Digits after the point; 0 writes integers.
        separator: One byte.
        strip_zeros: Whether to omit trailing zeros of a fraction, and a point at the end.
        missing: What stands for NaN.

    Raises:
        ValueError: A value is too large for 32 bits at this number of decimals.
    """
    absent = np.isnan(values)
    scaled = np.rint(np.abs(np.where(absent, 0, values)).astype(np.float64) * 10**decimals)
    if scaled.size and scaled.max() > MAX_SCALED:
        raise ValueError(f"{np.nanmax(np.abs(values))} is too large for {decimals} decimals")
    left = scaled.astype(np.uint32)
    negative = (values < 0) & (left > 0)
    num_integer_digits = max(1, len(str(int(left.max(initial=0)))) - decimals)
    num_fraction_places = decimals + 1 if decimals else 0  # with the point
    # A field: separator, sign, integer digits, point, decimals; `written` marks the visible ones.
    width = 2 + num_integer_digits + num_fraction_places
    num_missing = len(missing)
    text = np.empty((*left.shape, max(width, 1 + num_missing)), np.uint8)
    written = np.zeros(text.shape, bool)
    text[:, :, 0], text[:, :, 1] = ord(separator), ord("-")
    written[:, :, 0], written[:, :, 1] = True, negative
    in_fraction = np.full(left.shape, not strip_zeros)  # whether a digit further right is visible
    position = width - 1
    for _ in range(decimals):
        left, digit = np.divmod(left, np.uint32(10))
        in_fraction |= digit != 0
        text[:, :, position], written[:, :, position] = digit + ord("0"), in_fraction
        position -= 1
    if decimals:
        text[:, :, position], written[:, :, position] = ord("."), in_fraction
        position -= 1
    last_integer = position
    for _ in range(num_integer_digits):
        more = left > 0
        left, digit = np.divmod(left, np.uint32(10))
        text[:, :, position] = digit + ord("0")
        written[:, :, position] = more if position < last_integer else True
        position -= 1
    if absent.any():
        written[absent, 1:] = False
        for i, byte in enumerate(missing, start=1):
            text[absent, i], written[absent, i] = byte, True
    rows = zip(prefixes, text, written, strict=True)
    return b"".join(_line(prefix, row[mask].tobytes()) for prefix, row, mask in rows)


def _line(prefix: bytes, fields: bytes) -> bytes:
    return (prefix + fields if prefix else fields[1:]) + b"\n"
