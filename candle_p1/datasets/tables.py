"""Tables of numbers as text, formatted digit by digit for whole blocks of rows at once.

Formatting the hundred million values of a synthetic file one by one would take minutes; this takes
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.cases import LAYOUT

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
    num_digits = max(decimals + 1, len(str(int(left.max(initial=0)))))
    # A field: separator, sign, digits with the point among them; `shown` marks the visible ones.
    width = 2 + num_digits + (decimals > 0)
    text = np.empty((*left.shape, max(width, 1 + len(missing))), np.uint8)
    shown = np.zeros(text.shape, bool)
    text[:, :, :2] = list(separator + b"-")
    shown[:, :, 0], shown[:, :, 1] = True, (values < 0) & (left > 0)
    fraction = np.full(left.shape, not strip_zeros)
    for exponent in range(num_digits):
        position = width - 1 - exponent - (0 < decimals <= exponent)
        if exponent == decimals > 0:
            text[:, :, position + 1], shown[:, :, position + 1] = ord("."), fraction
        is_left = left > 0
        left, digit = np.divmod(left, np.uint32(10))
        text[:, :, position] = digit + ord("0")
        if exponent < decimals:
            fraction |= digit != 0
        shown[:, :, position] = (
            fraction if exponent < decimals else is_left | (exponent == decimals)
        )
    text[absent, 1 : 1 + len(missing)] = list(missing)
    shown[absent, 1:] = np.arange(1, text.shape[2]) <= len(missing)
    rows = zip(prefixes, text, shown, strict=True)
    return b"".join(
        prefix + row[mask].tobytes()[not prefix :] + b"\n" for prefix, row, mask in rows
    )


def write_cases(
    features: Sequence[str],
    types: Sequence[str],
    cases: Sequence[tuple[int, int]],
    values: Callable[[int, int], NDArray[Any]],
    *,
    decimals: int,
    rows_per_block: int,
) -> Iterator[bytes]:
    """Yields a table of tumor cases, as `candle_p1.data.cases` reads it: the header, then rows.

    `cases` has each row's patient number and index of the type, and `values` returns the values for
    such a pair, shape (features,). `rows_per_block` of them are in memory at a time.
    """
    yield ",".join([*LAYOUT.text_columns, *features]).encode() + b"\n"
    for start in range(0, len(cases), rows_per_block):
        block = cases[start : start + rows_per_block]
        prefixes = [
            f"TCGA-S{patient // 10_000}-{patient % 10_000:04},{types[kind]}".encode()
            for patient, kind in block
        ]
        rows = np.stack([values(patient, kind) for patient, kind in block])
        yield format_rows(prefixes, rows, decimals=decimals, strip_zeros=True)
