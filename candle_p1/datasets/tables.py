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
    # A field: separator, sign, digits with the point among them; `written` marks the visible ones.
    point = 2 + num_digits - decimals
    width = 2 + num_digits + (decimals > 0)
    text = np.empty((*left.shape, max(width, 1 + len(missing))), np.uint8)
    written = np.zeros(text.shape, bool)
    text[:, :, :2] = list(separator + b"-")
    written[:, :, 0], written[:, :, 1] = True, (values < 0) & (left > 0)
    in_fraction = np.full(left.shape, not strip_zeros)  # whether a digit further right is visible
    for position in range(width - 1, 1, -1):
        if decimals and position == point:
            text[:, :, position], written[:, :, position] = ord("."), in_fraction
            continue
        more = left > 0
        left, digit = np.divmod(left, np.uint32(10))
        text[:, :, position] = digit + ord("0")
        if position > point:
            in_fraction |= digit != 0
            more = in_fraction
        written[:, :, position] = more if position != point - 1 else True
    if absent.any():
        written[absent, 1:] = False
        text[absent, 1 : 1 + len(missing)] = list(missing)
        written[absent, 1 : 1 + len(missing)] = True
    rows = zip(prefixes, text, written, strict=True)
    return b"".join(
        prefix + row[mask].tobytes()[0 if prefix else 1 :] + b"\n" for prefix, row, mask in rows
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

    Args:
        features: The features' names.
        types: The cancer types.
        cases: The patient's number and the index of the type, for each row.
        values: Returns a row's values, shape (features,), for such a pair.
        decimals: Digits after the point; trailing zeros are omitted.
        rows_per_block: The number of rows in memory at a time.
    """
    yield ",".join([*LAYOUT.text_columns, *features]).encode() + b"\n"
    for start in range(0, len(cases), rows_per_block):
        block = cases[start : start + rows_per_block]
        prefixes = [f"{_barcode(patient)},{types[kind]}".encode() for patient, kind in block]
        rows = np.stack([values(patient, kind) for patient, kind in block])
        yield format_rows(prefixes, rows, decimals=decimals, strip_zeros=True)


def _barcode(patient: int) -> str:
    """In the style of TCGA."""
    return f"TCGA-S{patient // 10_000}-{patient % 10_000:04}"
