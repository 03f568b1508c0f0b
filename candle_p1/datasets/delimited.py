"""Reading text with separators as people and programs write it, row by row.

pandas pads short rows and reads a column with one misprint as text; here, both are errors with
their line.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pandas as pd

from candle_p1.data.table import repeated
from candle_p1.errors import DataError

SEPARATORS = "\t,;|"
COMMENTS = ("#", "!", "^")
"""How lines above the header begin that describe a table, as in GEO's and GDC's files."""
GCT, KNOWN_GCT = "#1.", "#1.2"
"""How a GCT file begins, whose second line has the numbers of its rows and columns."""
MISSING = {
    *("", "NA", "na", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "None", "<NA>"),
    *(".", "-", "--", "'--"),
}
SAMPLE_FIELDS, MIN_SAMPLE, MAX_SAMPLE = 1_000_000, 20, 200
"""From so many fields, but at least and at most so many rows, it is seen which columns are text."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(inf|Inf|INF)(inity)?")
COMMA_NUMBER = re.compile(r"[-+]?\d+,\d+([eE][-+]?\d+)?")
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+")
WITH_POINT = str.maketrans(",.", ".'")
"""Makes a decimal comma a point, and a point what no number has."""
QUOTED = re.compile(r'"[^"]*"')

Row = tuple[int, list[str]]
"""The number of a row's first line in the file, and its fields."""

IsText = Callable[[int, str], bool]


class TextForm(NamedTuple):
    """How many rows name the columns, which has the names to use, and the decimal mark.

    None: as the cells say, and an error if they do not.
    """

    header_rows: int | None = None
    name_row: int = 1
    decimal: str | None = None


class Content(NamedTuple):
    """The content of a file.

    Attributes:
        numbers: The columns of numbers, float32, NaN where they are missing.
        text: The columns of text by name; "" names the rows, if no name stands above them.
        notes: What was understood, as clauses for the user.
        is_across: Whether columns are samples, where the format says so.
    """

    numbers: pd.DataFrame
    text: dict[str, list[str]]
    notes: Sequence[str] = ()
    is_across: bool | None = None


def read_delimited(path: Path, form: TextForm, is_text: IsText) -> Content:
    """Returns the table in a text file, compressed or not.

    Args:
        path: The file.
        form: What is known of it.
        is_text: Called with the place and the name of a column: whether it is text even if it holds
            numbers.

    Raises:
        DataError: The file is no such table, or can be read in several ways.
        OSError: It cannot be read; a decompressor may raise its own errors.
    """
    with closing(_lines(path)) as lines:
        return _Delimited(path, lines, form, is_text).read()


def _open_zst(path: Path) -> IO[bytes]:
    try:
        import pyarrow
    except ImportError as error:
        problem = "reading .zst needs pyarrow: pip install 'candle-p1[readers]'"
        raise DataError(problem, path) from error
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


def _lines(path: Path) -> Generator[str, None, None]:
    opener = OPENERS.get(path.suffix.lower())
    with (
        opener(path) if opener else path.open("rb") as stream,
        io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines,
    ):
        yield from lines


@dataclass
class _Delimited:
    """A table, without the comments above it."""

    path: Path
    lines: Iterator[str]
    form: TextForm
    is_text: IsText

    def read(self) -> Content:
        """Returns the table; see `read_delimited`."""
        (header_rows, name_row, decimal), rows = self.form, self._rows(self._first_lines())
        size = SAMPLE_FIELDS // self._num_separators
        first = list(islice(rows, min(max(size, MIN_SAMPLE), MAX_SAMPLE)))
        num_headers = header_rows or self._num_headers([cells for _, cells in first])
        if not 1 <= name_row <= num_headers:
            raise self._error(f"there is no header row {name_row}, only {num_headers}")
        body = first[num_headers:]
        if not body:
            raise self._error("there are no rows below the header")
        names = self._whole_header(first[name_row - 1][1], body)
        self._mark = decimal or self._decimal([cells for _, cells in body])
        columns: tuple[list[int], list[int]] = [], []
        for column, name in enumerate(names):
            is_known = name == "" or self.is_text(column, name)
            columns[is_known or self._holds_text(column, name, body)].append(column)
        numbers, text = columns
        for name in repeated(names[column] for column in text)[:1]:
            raise self._error(f"several columns of text are called {name!r}")
        values, cells = [], []
        for number, row in chain(body, rows):
            if len(row) != len(names):
                problem = f"the row has {len(row):,} fields, but the header has {len(names):,}"
                raise self._error(problem, number)
            values.append(self._numbers(number, row, numbers))
            cells.append(["" if row[column] in MISSING else row[column] for column in text])
        notes = [f"fields separated by {self._separator!r}"]
        notes += [f"names from row {name_row} of {num_headers} header rows"] * (num_headers > 1)
        notes += [f"decimal {self._mark!r}"] * (self._mark != ".")
        return Content(
            pd.DataFrame(np.stack(values), columns=[names[column] for column in numbers]),
            {names[column]: [row[i] for row in cells] for i, column in enumerate(text)},
            notes,
            True if self._is_gct else None,
        )

    def _error(self, problem: str, line: int = 0, column: int | None = None) -> DataError:
        return DataError(problem, self.path, line or self._begin, column)

    def _first_lines(self) -> list[str]:
        """Finds the table's first lines and its separator, and what the lines above it tell."""
        self._is_gct, self._is_geo, self._begin, comment = False, False, 1, ""
        first: list[str] = []
        for number, line in enumerate(self.lines, start=1):
            if number == 1 and line.startswith(GCT):
                self._is_gct = True
                if line.strip() != KNOWN_GCT:
                    problem = f"this is GCT {line.strip()[1:]}: convert it to GCT 1.2, or to CSV"
                    raise self._error(problem)
            elif self._is_gct and number == 2:
                continue
            elif not first and (line.startswith(COMMENTS) or not line.strip()):
                self._is_geo |= line.startswith("!")
                comment = line if line.strip() else comment
            else:
                self._begin = self._begin if first else number
                first.append(line)
            if len(first) == 2:
                break
        if not first:
            raise self._error("the file has no rows")
        bare = [QUOTED.sub("", line) for line in first]
        counts = {each: min(line.count(each) for line in bare) for each in SEPARATORS}
        self._separator = max(counts, key=lambda each: counts[each])
        self._num_separators = counts[self._separator]
        if not self._num_separators:
            problem = "the fields are separated by none of tab, comma, semicolon and bar"
            raise self._error(problem)
        if comment.startswith("#") and comment.count(self._separator) == self._num_separators:
            problem = "this line begins with # and may be the header: remove the #, or the line"
            raise self._error(problem, self._begin - 1)
        return first

    def _rows(self, first: Sequence[str]) -> Iterator[Row]:
        """Yields the rows, header included."""
        csv.field_size_limit(2**30)
        lines = chain(first, self.lines)
        reader = csv.reader(lines, delimiter=self._separator, strict=True)
        while True:
            number = self._begin + reader.line_num
            try:
                row = next(reader, None)
            except csv.Error as error:
                problem = f"its quotes do not match ({error}): correct the row"
                raise self._error(problem, number) from error
            if row is None or (self._is_geo and row and row[0].startswith("!")):
                return
            if row:
                yield number, [cell.strip() for cell in row]

    def _num_headers(self, rows: Sequence[Sequence[str]]) -> int:
        """Returns 1; raises DataError if none or several rows seem to name the columns."""
        num = next((i for i, row in enumerate(rows) if i and any(map(_is_number, row[1:]))), 1)
        while num < len(rows) and not rows[num][0]:
            num += 1
        if num > 1:
            raise self._error(
                f"{num} rows seem to name the columns: pass --header_rows {num} if so (and"
                " --name_row, which of them has the features' names), else --header_rows 1"
            )
        if all(map(NUMBER.fullmatch, rows[0][1:])):
            problem = "the first row holds numbers: add a row of names, or pass --header_rows 1"
            raise self._error(problem)
        return 1

    def _whole_header(self, names: list[str], body: Sequence[Row]) -> list[str]:
        """Returns a name for each column; "" for the first one, if it only names the rows."""
        number, row = body[0]
        if len(row) == len(names) + 1:  # as R writes it: the column of names has none
            if not any(cells[-1] for _, cells in body):
                problem = "the rows end with a separator, but the header does not: remove it"
                raise self._error(problem, number)
            names = ["", *names]
        if "" in names[1:]:
            problem = "the column has no name: name it or remove it"
            raise self._error(problem, column=names.index("", 1) + 1)
        return names

    def _decimal(self, rows: Sequence[Sequence[str]]) -> str:
        """Returns the decimal mark; raises DataError if it may be either."""
        found: set[str] = set()
        width = len(rows[0]) if self._separator != "," else 0
        for column in range(width):
            cells = [row[column] for row in rows if len(row) == width]
            cells = [cell for cell in cells if cell not in MISSING]
            if all(map(_is_number, cells)):
                found.update(cell for cell in cells if "," in cell or "." in cell)
        commas = [cell for cell in found if "," in cell]
        if commas and (len(commas) < len(found) or all(map(THOUSANDS.fullmatch, commas))):
            raise self._error(
                f"{min(commas)!r} may have a decimal comma or mean thousands: pass --decimal , or"
                " remove the commas"
            )
        return "," if commas else "."

    def _holds_text(self, column: int, name: str, body: Sequence[Row]) -> bool:
        """Returns whether a column holds text; raises DataError if it also holds numbers."""
        found = [(number, row[column]) for number, row in body if column < len(row)]
        cells = [(number, cell) for number, cell in found if cell not in MISSING]
        words = [each for each in cells if not NUMBER.fullmatch(each[1].replace(self._mark, "."))]
        if words and len(words) < len(cells):
            number, cell = words[0]
            raise self._error(
                f"{cell!r} is not a number, as other cells of the column {name!r} are: correct it,"
                f" or leave the column out (--drop {name})",
                number,
                column + 1,
            )
        return bool(words)

    def _numbers(self, number: int, row: Sequence[str], columns: Sequence[int]) -> Any:
        """Returns the numbers of a row, float32; raises DataError if one is none."""
        cells = [row[column] for column in columns]
        if self._mark == ",":
            cells = [cell if cell in MISSING else cell.translate(WITH_POINT) for cell in cells]
        try:
            if "_" in "".join(cells):  # which Python allows in numbers
                raise ValueError
            if not MISSING.isdisjoint(cells):
                cells = ["nan" if cell in MISSING else cell for cell in cells]
            return np.array([*map(float, cells)], np.float32)
        except ValueError:
            for column, cell in zip(columns, cells, strict=True):
                if cell not in MISSING and not NUMBER.fullmatch(cell):
                    problem = f"{row[column]!r} is not a number, as the cells above it are"
                    problem += " with a decimal comma" * (self._mark == ",")
                    raise self._error(problem, number, column + 1) from None
            raise


def _is_number(cell: str) -> bool:
    return bool(NUMBER.fullmatch(cell) or COMMA_NUMBER.fullmatch(cell))
