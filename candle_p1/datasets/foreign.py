"""Reading the tables that people have: text in its usual forms, and the formats of other programs.

What is in a table is told apart here as far as its cells say: names of rows and columns, columns of
text, columns of numbers. What they mean is the business of `candle_p1.datasets.importing`.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from candle_p1.data.table import repeated
from candle_p1.errors import DataError

SEPARATORS = "\t,;|"
COMMENTS = ("#", "!", "^")
"""How lines above the header begin that describe a table, as in GEO's and GDC's files."""
GCT, KNOWN_GCT = "#1.", "#1.2"
"""How a GCT file begins, whose second line has the numbers of its rows and columns."""
MISSING = frozenset(
    ["", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "None", "<NA>", ".", "--", "'--"]
)
SAMPLE_FIELDS, MIN_SAMPLE, MAX_SAMPLE = 1_000_000, 20, 200
"""From so many fields, but at least and at most so many rows, it is seen which columns are text."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(inf|Inf|INF)(inity)?")
COMMA_NUMBER = re.compile(r"[-+]?\d+,\d+([eE][-+]?\d+)?")
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+")
QUOTED = re.compile(r'"[^"]*"')
FRAMES: dict[str, tuple[str, str]] = {
    ".parquet": ("read_parquet", "readers"),
    ".pq": ("read_parquet", "readers"),
    ".feather": ("read_feather", "readers"),
    ".h5": ("read_hdf", "hdf5"),
    ".hdf5": ("read_hdf", "hdf5"),
}
"""The functions of pandas that read a format, and the extra of this package that they need."""


@dataclass(frozen=True)
class ReadOptions:
    """How to read a table.

    Attributes:
        header_rows: How many rows name the columns of a text file; None: one, and an error if there
            seem to be more.
        name_row: Which of them has the names to use, from 1.
        decimal: The decimal mark; None: as the cells say, and an error if they do not.
        text: Names of columns that are text even if they hold numbers.
        skipped: Names of columns to leave out.
        is_text: Whether all columns are text.
    """

    header_rows: int | None = None
    name_row: int = 1
    decimal: str | None = None
    text: Collection[str] = ()
    skipped: Collection[str] = ()
    is_text: bool = False


@dataclass
class ForeignTable:
    """A table as it is in its file.

    Attributes:
        path: The file.
        names: The names of the columns of numbers.
        values: Their content, float32, NaN where it is missing; shape (rows, columns).
        text: The columns of text by name, in their order; "" where it is missing.
        index: The names of the rows, if the file tells them apart from its columns.
        notes: What was understood, as clauses for the user.
        is_across: Whether columns are samples, where the format says so.
        skipped: The names of the columns that were left out.
    """

    path: Path
    names: list[str]
    values: NDArray[np.float32]
    text: dict[str, list[str]]
    index: list[str] | None
    notes: list[str] = field(default_factory=list)
    is_across: bool | None = None
    skipped: Collection[str] = ()

    def __len__(self) -> int:
        return len(self.values)


def read_foreign(path: Path, options: ReadOptions) -> ForeignTable:
    """Returns the table in a file, whose format its name tells.

    Raises:
        DataError: The file cannot be read, is no such table, or can be read in several ways.
    """
    try:
        last = path.suffix.lower()
        if last in FRAMES:
            return _from_frame(path, _read_frame(path, *FRAMES[last]), options)
        if last == ".h5ad":
            return _from_anndata(path)
        if last in (".xlsx", ".xls", ".ods"):
            problem = "this is a spreadsheet: save its sheet as CSV (UTF-8) and import that"
            raise DataError(problem, path)
        return _TextFile(path, options).read()
    except UnicodeDecodeError as error:
        problem = f"its text is not UTF-8 ({error.reason}): save or convert it as UTF-8"
        raise DataError(problem, path) from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it ends too early"
        raise DataError(f"the file cannot be read: {reason}", path) from error


def _read_frame(path: Path, function: str, extra: str) -> pd.DataFrame:
    try:
        frame = getattr(pd, function)(path)
    except ImportError as error:
        problem = f"reading it needs a package ({error}): pip install 'candle-p1[{extra}]'"
        raise DataError(problem, path) from error
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise DataError(f"pandas cannot read it: {error}", path) from error
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"it holds a {type(frame).__name__}, not a table", path)
    return frame


def _from_frame(path: Path, frame: pd.DataFrame, options: ReadOptions) -> ForeignTable:
    """Returns what a DataFrame holds; its index is one unless it only counts the rows."""
    counts = isinstance(frame.index, pd.RangeIndex) and frame.index.name is None
    names = [
        " ".join(map(str, name if isinstance(name, tuple) else [name]))
        for name in cast("list[Any]", frame.columns.tolist())
    ]
    numbers, text = [], {}
    for column, (name, kind) in enumerate(zip(names, frame.dtypes, strict=True)):
        is_number = pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind)
        if name in options.skipped:
            continue
        if is_number and not (options.is_text or name in options.text):
            numbers.append(column)
            continue
        if name in text:
            raise DataError(f"several columns of text are called {name!r}", path)
        text[name] = [_text_of(value) for value in frame.iloc[:, column]]
        if not options.is_text and name not in options.text:
            _check_words(path, name, text[name])
    if "" in names:
        raise DataError("a column has no name: name it or remove it", path)
    values = np.array(frame.iloc[:, numbers].to_numpy(np.float32, na_value=np.nan), order="C")
    index = None if counts else [_text_of(name) for name in frame.index]
    skipped = [name for name in names if name in options.skipped]
    return ForeignTable(path, [names[i] for i in numbers], values, text, index, skipped=skipped)


def _text_of(value: Any) -> str:
    is_missing = not isinstance(value, (list, np.ndarray)) and pd.isna(value)
    text = "" if is_missing else str(value).strip()
    return "" if text in MISSING else text


def _check_words(path: Path, name: str, cells: Sequence[str]) -> None:
    """Raises DataError if a column of text also holds numbers, and may be one of numbers."""
    numbers = [row for row, cell in enumerate(cells) if cell and NUMBER.fullmatch(cell)]
    words = [row for row, cell in enumerate(cells) if cell and not NUMBER.fullmatch(cell)]
    if numbers and words:
        raise DataError(
            f"the column {name!r} holds both numbers and text, such as {cells[words[0]]!r} in row"
            f" {words[0] + 1} of the data: correct it, or leave the column out (--drop {name})",
            path,
        )


def _from_anndata(path: Path) -> ForeignTable:
    """Returns the matrix X of an AnnData file, and what it says of its observations as text."""
    try:
        from anndata import read_h5ad
    except ImportError as error:
        problem = "reading it needs anndata: pip install 'candle-p1[anndata]'"
        raise DataError(problem, path) from error
    try:
        data = read_h5ad(path)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"anndata cannot read it: {error}", path) from error
    if data.X is None:
        raise DataError("it has no matrix X", path)
    matrix = data.X.astype(np.float32)
    matrix = matrix.toarray() if hasattr(matrix, "toarray") else np.array(matrix)
    text = {str(name): [*map(_text_of, column)] for name, column in data.obs.items()}
    notes = ["its matrix X, with the columns of obs as text"]
    names, index = [*map(str, data.var_names)], [*map(str, data.obs_names)]
    return ForeignTable(path, names, matrix, text, index, notes, is_across=False)


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


@dataclass
class _TextFile:
    """A table in a text file, compressed or not."""

    path: Path
    options: ReadOptions

    def read(self) -> ForeignTable:
        """Returns the table; see `read_foreign`."""
        with closing(self._lines()) as lines:
            self._skip_comments(lines)
        with closing(self._lines()) as lines:
            return self._read(self._tokens(lines))

    def _read(self, tokens: Iterator[tuple[int, list[str]]]) -> ForeignTable:
        num = min(max(SAMPLE_FIELDS // self._num_separators, MIN_SAMPLE), MAX_SAMPLE)
        first = list(islice(tokens, num))
        rows = [cells for _, cells in first]
        num_headers = self._num_headers(rows)
        names, body = rows[self.options.name_row - 1], first[num_headers:]
        if not body:
            raise DataError("there are no rows below the header", self.path, self._begin)
        names = self._whole_header(names, body)
        cells = [cells for _, cells in body if len(cells) == len(names)]
        decimal = self._decimal(cells)
        kinds = [self._kind(column, name, body, decimal) for column, name in enumerate(names)]
        notes = [f"fields separated by {self._separator!r}"]
        if num_headers > 1:
            notes.append(f"names from row {self.options.name_row} of {num_headers} header rows")
        notes += [f"decimal {decimal!r}"] * (decimal != ".")
        numbers = [column for column, kind in enumerate(kinds) if kind == "number"]
        texts = [column for column, kind in enumerate(kinds) if kind == "text"]
        doubled = repeated(names[column] for column in texts)
        if doubled:
            problem = f"several columns of text are called {doubled[0]!r}"
            raise DataError(problem, self.path, self._begin)
        columns: dict[int, list[str]] = {column: [] for column in texts}
        values = []
        for number, row in (*body, *tokens):
            if len(row) != len(names):
                problem = f"the row has {len(row):,} fields, but the header has {len(names):,}"
                raise DataError(problem, self.path, number)
            values.append(self._numbers(number, row, numbers, decimal))
            for column, text in columns.items():
                text.append("" if row[column] in MISSING else row[column])
        return ForeignTable(
            self.path,
            [names[i] for i in numbers],
            np.stack(values),
            {names[column]: text for column, text in columns.items() if names[column]},
            None if names[0] else columns[0],
            notes,
            is_across=True if self._is_gct else None,
            skipped=[name for name in names if name in self.options.skipped],
        )

    def _lines(self) -> Generator[str, None, None]:
        opener = OPENERS.get(self.path.suffix.lower())
        with (
            opener(self.path) if opener else self.path.open("rb") as stream,
            io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines,
        ):
            yield from lines

    def _skip_comments(self, lines: Iterator[str]) -> None:
        """Finds the first line of the table, its separator, and what the lines above it tell."""
        self._is_gct, self._is_geo, self._begin, comment = False, False, 1, ""
        first: list[str] = []
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.startswith(GCT):
                self._is_gct = True
                if line.strip() != KNOWN_GCT:
                    problem = f"this is GCT {line.strip()[1:]}: convert it to GCT 1.2, or to CSV"
                    raise DataError(problem, self.path)
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
            raise DataError("the file has no rows", self.path)
        bare = [QUOTED.sub("", line) for line in first]
        counts = {each: min(line.count(each) for line in bare) for each in SEPARATORS}
        self._separator = max(counts, key=lambda each: counts[each])
        self._num_separators = counts[self._separator]
        if not self._num_separators:
            problem = "the fields are separated by none of tab, comma, semicolon and bar"
            raise DataError(problem, self.path, self._begin)
        if comment.startswith("#") and comment.count(self._separator) == self._num_separators:
            problem = "this line begins with # and may be the header: remove the #, or the line"
            raise DataError(problem, self.path, self._begin - 1)

    def _tokens(self, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
        """Yields the number and the fields of each row, header included."""
        csv.field_size_limit(2**30)
        reader = csv.reader(
            islice(lines, self._begin - 1, None), delimiter=self._separator, strict=True
        )
        while True:
            number = self._begin + reader.line_num
            try:
                row = next(reader, None)
            except csv.Error as error:
                problem = f"its quotes do not match ({error}): correct the row"
                raise DataError(problem, self.path, number) from error
            if row is None or (self._is_geo and row and row[0].startswith("!")):
                return
            if row:
                yield number, [cell.strip() for cell in row]

    def _num_headers(self, rows: Sequence[Sequence[str]]) -> int:
        """Returns how many rows name the columns.

        Raises:
            DataError: There seem to be none or several, and nobody has said how many.
        """
        num = self.options.header_rows
        if num is None:
            seen = next((i for i, row in enumerate(rows) if i and self._has_numbers(row[1:])), 1)
            while seen < len(rows) and not rows[seen][0]:
                seen += 1
            if seen > 1 and not self.options.is_text:
                raise DataError(
                    f"{seen} rows seem to name the columns: pass --header_rows {seen} if so (and"
                    " --name_row, which of them has the features' names), else --header_rows 1",
                    self.path,
                    self._begin,
                )
            if rows[0][1:] and all(NUMBER.fullmatch(cell) for cell in rows[0][1:]):
                problem = "the first row holds numbers: add a row of names, or pass --header_rows 1"
                raise DataError(problem, self.path, self._begin)
            num = 1
        if not 1 <= self.options.name_row <= num:
            problem = f"there is no header row {self.options.name_row}, only {num}"
            raise DataError(problem, self.path, self._begin)
        return num

    @staticmethod
    def _has_numbers(cells: Sequence[str]) -> bool:
        return any(NUMBER.fullmatch(cell) or COMMA_NUMBER.fullmatch(cell) for cell in cells)

    def _whole_header(
        self, names: list[str], body: Sequence[tuple[int, Sequence[str]]]
    ) -> list[str]:
        """Returns a name for each column; "" for the first one, if it names the rows.

        Raises:
            DataError: There are too many or too few, or several of text are the same.
        """
        number, row = body[0]
        if len(row) == len(names) + 1:  # as R writes it: the column of names has none
            if not any(cells[-1] for _, cells in body):
                problem = "the rows end with a separator, but the header does not: remove it"
                raise DataError(problem, self.path, number)
            names = ["", *names]
        if "" in names[1:]:
            place = names.index("", 1) + 1
            problem = "the column has no name: name it or remove it"
            raise DataError(problem, self.path, self._begin, place)
        return names

    def _decimal(self, rows: Sequence[Sequence[str]]) -> str:
        """Returns the decimal mark.

        Raises:
            DataError: It may be either.
        """
        if self.options.decimal or self._separator == ",":
            return self.options.decimal or "."
        with_comma: set[str] = set()
        with_point: set[str] = set()
        for column in zip(*rows, strict=True):
            cells = [cell for cell in column if cell not in MISSING]
            if all(NUMBER.fullmatch(cell) or COMMA_NUMBER.fullmatch(cell) for cell in cells):
                with_comma.update(cell for cell in cells if "," in cell)
                with_point.update(cell for cell in cells if "." in cell)
        if not with_comma:
            return "."
        if with_point or all(THOUSANDS.fullmatch(cell) for cell in with_comma):
            raise DataError(
                f"{min(with_comma)!r} may have a decimal comma or mean thousands: pass --decimal ,"
                " or remove the commas",
                self.path,
                self._begin,
            )
        return ","

    def _kind(
        self, column: int, name: str, body: Sequence[tuple[int, Sequence[str]]], decimal: str
    ) -> str:
        """Returns what a column holds: "text", "number", or what is "skipped".

        Raises:
            DataError: It holds numbers and text.
        """
        options = self.options
        if name in options.skipped and name:
            return "skipped"
        if options.is_text or name in options.text or (column == 0 and not name):
            return "text"
        words, has_numbers = [], False
        for number, row in body:
            cell = row[column] if column < len(row) else ""
            if cell not in MISSING:
                is_number = NUMBER.fullmatch(cell.replace(decimal, "."))
                has_numbers |= bool(is_number)
                words += [] if is_number else [(number, cell)]
        if words and has_numbers:
            number, cell = words[0]
            raise DataError(
                f"{cell!r} is not a number, as other cells of the column {name!r} are: correct it,"
                f" or leave the column out (--drop {name})",
                self.path,
                number,
                column + 1,
            )
        return "text" if words else "number"

    def _numbers(
        self, number: int, row: Sequence[str], columns: Sequence[int], decimal: str
    ) -> NDArray[np.float32]:
        """Returns the numbers of a row.

        Raises:
            DataError: One is none.
        """
        cells = [row[column].replace(decimal, ".") for column in columns]
        cells = ["nan" if cell in MISSING else cell for cell in cells]
        try:
            if any("_" in cell for cell in cells):
                raise ValueError
            return np.array(cells, "U").astype(np.float32)
        except ValueError:
            for column, cell in zip(columns, cells, strict=True):
                if cell != "nan" and not NUMBER.fullmatch(cell):
                    problem = f"{row[column]!r} is not a number, as the cells above it are"
                    raise DataError(problem, self.path, number, column + 1) from None
            raise
