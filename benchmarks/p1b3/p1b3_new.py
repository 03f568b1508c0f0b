"""Responses that a trained network is to predict, with the features of the run's own tables."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import Joined, NewRows
from candle_p1.data.loaders import read_table
from candle_p1.data.source import Loading
from candle_p1.errors import DataError
from candle_p1.text import examples
from p1b3_inputs import features_again
from p1b3_tables import RESPONSE, Features, join_features

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.data.directory import Quantity
    from candle_p1.data.inputs import Inputs
    from candle_p1.data.reader import Reader
    from candle_p1.parameters.parameter_set import ParameterSet

ROWS_PER_BLOCK = 256
CONCENTRATION, GROWTH = "LOG_CONCENTRATION", "GROWTH"


def check_responses(
    path: Path,
    quantities: Mapping[str, Quantity],
    params: ParameterSet,
    note: Callable[[str], None],
) -> None:
    """Checks that the numbers in a table mean what they should.

    Raises:
        DataError: They do not, a concentration is missing, or the table cannot be read.
    """
    low, high = params["min_logconc"], params["max_logconc"]
    table = read_table(path, Loading(), RESPONSE)
    column = dict(zip(table.columns, table.values.T, strict=True))
    if CONCENTRATION not in column:
        raise DataError(f"the header has no column {CONCENTRATION!r}", path, 1)
    if np.isnan(column[CONCENTRATION]).any():
        raise DataError(f"a {CONCENTRATION} is missing", path)
    for name in quantities.keys() & column.keys():
        known = column[name][~np.isnan(column[name])]
        if len(known) and not quantities[name].is_plausible(known):
            problem = f"{name}, from {known.min():g} to {known.max():g}, does not seem to be"
            raise DataError(f"{problem} {quantities[name].meaning}: convert it", path)
    is_outside = (column[CONCENTRATION] < low) | (column[CONCENTRATION] > high)
    if num_outside := int(is_outside.sum()):
        note(
            f"{num_outside:,} of {len(table):,} concentrations are not in the range from {low:g} to"
            f" {high:g} that the network was trained on: their predictions may be far off"
        )


def new_responses(
    path: Path,
    reader: Callable[[], Reader],
    params: ParameterSet,
    inputs: Inputs,
    percent: float,
) -> Iterator[NewRows]:
    """Yields the responses in a table, some at a time.

    Args:
        path: The table, after `check_responses`: NSC, CELLNAME, LOG_CONCENTRATION and maybe GROWTH.
        reader: Returns what reads the tables of features of the run.
        params: The parameters of the run.
        inputs: What the inputs went through.
        percent: The growth in the table that the model predicts as 1.

    Raises:
        DataError: The table cannot be read, or the run has no features of a cell line or a drug.
    """
    table = read_table(path, Loading(), RESPONSE)
    column = dict(zip(table.columns, table.values.T, strict=True))
    tables = features_again(partial(Features.read, reader()), params, inputs.features or [])
    line, drug = table.text["CELLNAME"], table.text["NSC"]
    known = {name for features in tables[0] for name in features.names}
    spelled = [name if name in known else name.replace(".", ":") for name in line.names]
    lines, drugs = (
        _join_known(names, features, what, path)
        for names, features, what in zip(
            (spelled, drug.names), tables, ("cell lines", "drugs"), strict=True
        )
    )
    concentration = column[CONCENTRATION][:, np.newaxis]
    rows = Joined(concentration, (line.codes, drug.codes), (lines, drugs))
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


def _join_known(
    names: Sequence[str], features: list[Features], what: str, path: Path
) -> NDArray[np.float32]:
    for each in features:
        unknown = sorted({*names}.difference(each.names))
        if unknown:
            raise DataError(
                f"there are no features of {len(unknown):,} {what}: {examples(unknown)};"
                " leave their rows out",
                path,
            )
    return join_features(features, names)
