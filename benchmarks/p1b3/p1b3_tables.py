"""P1B3's tables of cell lines and drugs, and how the names in the responses are matched with them.

A response names its cell line and its drug, whose features are stored once, in one matrix for the
lines and one for the drugs. `candle_p1.data.samples.Joined` joins their rows by index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.data.names import match
from candle_p1.data.table import CsvLayout, repeated
from candle_p1.data.transforms import fill_missing, join_rows, scale_features
from candle_p1.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from candle_p1.data.reader import Reader
    from candle_p1.data.table import TextColumn

    Matrix = NDArray[np.float32]

MISSING = (
    *("na", "-", ""),
    *("NA", "N/A", "n/a", "#NA", "#N/A", "#N/A N/A", "<NA>", "NULL", "null", "None"),
    *("NaN", "nan", "-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
)
"""What CANDLE takes for a missing number, and what pandas does by itself."""
LINE_TABLE = CsvLayout(header=True, text_columns=("CellLine",), separator="\t", missing=MISSING)
LAYOUTS = {
    "expression": LINE_TABLE,
    "mirna": LINE_TABLE,
    "proteome": LINE_TABLE,
    "kinome": LINE_TABLE,
    "descriptors": CsvLayout(True, ("NAME",), "\t", MISSING),
    "latent": CsvLayout(True, ("NSC",), ",", MISSING),
}
RESPONSE = CsvLayout(True, ("NSC", "CELLNAME"), ",", MISSING, may_have_index=True)
LISTS = {
    "test_cells": CsvLayout(header=True, text_columns=("CELLNAME",), may_have_index=True),
    "test_drugs": CsvLayout(header=True, text_columns=("NSC",), may_have_index=True),
}


@dataclass
class Features:
    """Features of cell lines or drugs.

    Attributes:
        names: The names of the lines or drugs, without repetition.
        values: float32, shape (names, features).
        columns: The names of the features, each with the role of its table.
        is_ready: Whether the values are inputs as they are, without scaling.
        scaled_by: The offset and the scale of each feature, once they are scaled.
    """

    names: list[str]
    values: Matrix
    columns: list[str]
    is_ready: bool = False
    scaled_by: tuple[Matrix, Matrix] | None = None

    @classmethod
    def read(cls, reader: Reader, role: str) -> Features:
        """Reads a table; in names of cell lines, "." becomes ":", as in the responses.

        Raises:
            DataError: It cannot be read, or a name is then repeated.
        """
        table = reader.read(role, LAYOUTS[role])
        (column,) = table.text.values()
        names = column.values()
        if LAYOUTS[role] is LINE_TABLE:
            names = [name.replace(".", ":") for name in names]
        for name in repeated(names)[:1]:
            raise DataError(f"{name!r} has more than one row", reader.files.paths[role])
        return cls(names, table.values, [f"{role}:{name}" for name in table.columns])

    def rows_of(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Returns the row of each name, -1 for unknown ones: int64, shape (names,)."""
        rows = {name: i for i, name in enumerate(self.names)}
        return np.array([rows.get(name, -1) for name in names], np.int64)

    def beside(self, other: Features) -> Features:
        """Returns the features of both tables, for the names that both have."""
        known = set(other.names)
        names = [name for name in self.names if name in known]
        values = join_rows(*((table.values, table.rows_of(names)) for table in (self, other)))
        return Features(names, values, [*self.columns, *other.columns])

    def take_columns(self, num: int, random: np.random.RandomState) -> None:
        """Keeps this many random columns; 0 keeps all."""
        total = self.values.shape[1]
        if 0 < num < total:
            self.select(random.choice(total, size=num, replace=False))

    def select(self, columns: NDArray[np.int64]) -> None:
        """Keeps some columns, given by index, in this order."""
        self.values = self.values[:, columns]
        self.columns = [self.columns[i] for i in columns]

    def impute_and_scale(self, scaling: str, fit_rows: NDArray[np.int64] | None) -> None:
        """Replaces missing values by means and scales each column, fitted to these rows or all."""
        if self.is_ready:
            self.scaled_by = scale_features(None, self.values)
            return
        maybe = np.flatnonzero(np.isnan(self.values[0]))
        empty = {*maybe[np.isnan(self.values[:, maybe]).all(axis=0)].tolist()}
        self.columns = [name for i, name in enumerate(self.columns) if i not in empty]
        self.values = fill_missing(self.values)
        fit_to = None if fit_rows is None else [self.values[fit_rows]]
        self.scaled_by = scale_features(scaling, self.values, fit_to=fit_to)


def join_features(tables: Sequence[Features], names: Sequence[str]) -> Matrix:
    """Returns the features of all tables for each name: float32, shape (names, features)."""
    if not tables:
        return np.zeros((len(names), 0), np.float32)
    return join_rows(*((table.values, table.rows_of(names)) for table in tables))


def names_in(column: TextColumn, names: Mapping[str, Any] | Sequence[str]) -> NDArray[np.bool_]:
    """Returns whether the value of each row of a text column is one of the names."""
    known = set(names)
    return np.array([name in known for name in column.names], bool)[column.codes]


def merge(
    column: TextColumn, rows: NDArray[np.int64], names: Mapping[str, Any] | Sequence[str]
) -> NDArray[np.int64]:
    """Returns the rows whose value in a text column is one of the names, as a merge orders them.

    That is pandas's order until 2.1, for which CANDLE's code was written: rows with the same value
    are adjacent, and the values are in the order of their first rows.
    """
    codes = column.codes[rows]
    first = np.empty(len(column.names), np.int64)
    first[codes[::-1]] = np.arange(len(rows))[::-1]  # of repeated codes, the last assignment counts
    rows = rows[np.argsort(first[codes], kind="stable")]
    merged: NDArray[np.int64] = rows[names_in(column, names)[rows]]
    return merged


def in_order(codes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the distinct codes in the order in which they first appear."""
    _, first = np.unique(codes, return_index=True)
    distinct: NDArray[np.int32] = codes[np.sort(first)]
    return distinct


def read_reserved(
    reader: Reader, role: str, what: str, column: TextColumn, tables: Mapping[str, Features]
) -> list[str]:
    """Returns the cell lines or drugs in a list of those that are reserved for testing.

    The names of the responses are matched with the list and with the tables, by role. A name in the
    list need not have responses if a table has it.

    Raises:
        DataError: Responses to what is reserved might be trained on, because they have another
            spelling of a name, or because nothing has the name; or too few match with a table.
    """
    known: set[str] = set()
    for each, table in tables.items():
        is_of_drugs = LAYOUTS[each] is not LINE_TABLE
        if is_of_drugs == (role == "test_drugs"):
            known.update(table.names)
            # CANDLE's descriptors are of the drugs screened at five doses, which are a minority.
            roles, effect = ("response", each), "the rows are left out"
            match(reader, what, roles, column, table.names, effect, is_part=is_of_drugs)
    (reserved,) = reader.read(role, LISTS[role]).text.values()
    join = match(reader, what, (role, "response"), reserved, column.names)
    if join.similar or not known.issuperset(join.lacking):
        raise DataError(
            f"{join.problem}: what is reserved for testing would be trained on; write the names as"
            " the responses do, and remove those that have none",
            reader.files.paths[role],
        )
    if join.problem:
        reader.warn(join.problem)
    return reserved.names
