"""Responses that a trained network is to predict, with the features of the run's own tables."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import NewRows
from candle_p1.data.blocks import read_blocks
from candle_p1.errors import DataError
from p1b3_inputs import features_again
from p1b3_tables import RESPONSE, Features, JoinedRows, join_features

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from candle_p1.data.inputs import Inputs
    from candle_p1.data.reader import Reader
    from candle_p1.parameters.parameter_set import ParameterSet

ROWS_PER_BLOCK = 256
MAX_EXAMPLES = 3
CONCENTRATION, GROWTH = "LOG_CONCENTRATION", "GROWTH"


def new_responses(
    path: Path,
    reader: Callable[[], Reader],
    params: ParameterSet,
    inputs: Inputs,
    percent: float,
) -> Iterator[NewRows]:
    """Yields the responses in a table, some at a time.

    Args:
        path: The table: NSC, CELLNAME, LOG_CONCENTRATION and maybe GROWTH.
        reader: Returns what reads the tables of features of the run.
        params: The parameters of the run.
        inputs: What the inputs went through.
        percent: The growth in the table that the model predicts as 1.

    Raises:
        DataError: The table cannot be read, or the run has no features of a cell line or a drug.
    """
    tables: tuple[list[Features], list[Features]] | None = None
    for table in read_blocks(path, RESPONSE):
        column = dict(zip(table.columns, table.values.T, strict=True))
        if CONCENTRATION not in column:
            raise DataError(f"the header has no column {CONCENTRATION!r}", path, 1)
        if np.isnan(column[CONCENTRATION]).any():
            raise DataError(f"a {CONCENTRATION} is missing", path)
        if tables is None:
            read = partial(Features.read, reader())
            tables = features_again(read, params, inputs.features or [])
        line, drug = table.text["CELLNAME"], table.text["NSC"]
        for texts, features, what in zip(
            (line, drug), tables, ("cell lines", "drugs"), strict=True
        ):
            _check_known(texts.names, features, what, path)
        lines, drugs = (
            join_features(each, texts.names)
            for each, texts in zip(tables, (line, drug), strict=True)
        )
        rows = JoinedRows(column[CONCENTRATION], line.codes, drug.codes, lines, drugs)
        for start in range(0, len(rows), ROWS_PER_BLOCK):
            part = slice(start, start + ROWS_PER_BLOCK)
            x = rows[part]
            inputs.apply(x)
            shown: dict[str, Sequence[Any]] = {
                "CELLNAME": [line.names[code] for code in line.codes[part]],
                "NSC": [drug.names[code] for code in drug.codes[part]],
                CONCENTRATION: [f"{value:g}" for value in column[CONCENTRATION][part]],
            }
            y = None
            if GROWTH in column:
                y = column[GROWTH][part, np.newaxis] / np.float32(percent)
            yield NewRows(x, shown, y)


def _check_known(names: Sequence[str], features: Sequence[Features], what: str, path: Path) -> None:
    for each in features:
        unknown = sorted({*names}.difference(each.names))
        if unknown:
            shown = ", ".join(map(repr, unknown[:MAX_EXAMPLES]))
            raise DataError(
                f"the run has no features of {len(unknown):,} {what}: {shown}"
                + ", …" * (len(unknown) > MAX_EXAMPLES),
                path,
            )
