"""Writing tables of tumor cases, as `candle_p1.data.cases` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.data.cases import LAYOUT
from candle_p1.datasets.number_text import format_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray


def write_cases(
    features: Sequence[str],
    types: Sequence[str],
    cases: Sequence[tuple[int, int]],
    values: Callable[[int, int], NDArray[Any]],
    *,
    decimals: int,
    rows_per_block: int,
) -> Iterator[bytes]:
    """Yields the text of a table of cases: the header, then blocks of rows.

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
        prefixes = [f"{case_id(patient)},{types[kind]}".encode() for patient, kind in block]
        rows = np.stack([values(patient, kind) for patient, kind in block])
        yield format_rows(prefixes, rows, decimals=decimals, strip_zeros=True)


def case_id(patient: int) -> str:
    """Returns a barcode in the style of TCGA."""
    return f"TCGA-S{patient // 10_000}-{patient % 10_000:04}"
