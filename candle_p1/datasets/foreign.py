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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from candle_p1.errors import DataError

SEPARATORS = "\t,;|"
COMMENTS = ("#", "!", "^")
"""What lines that are no rows begin with: comments; the description of a series or sample in GEO's
files."""
GCT = "#1."
"""How a GCT file begins, whose second line holds the numbers of rows and columns."""
MISSING = frozenset(
    ("", "NA", "N/A", "#N/A", "NaN", "nan", "-nan", "null", "NULL", "None", "<NA>", "n/a", ".")
)
SAMPLE_FIELDS, MIN_SAMPLE, MAX_SAMPLE = 1_000_000, 20, 200
"""From so many fields, but at least and at most so many rows, it is seen which columns are text."""
MAX_HEADER_ROWS = 5
COMMA_NUMBER = re.compile(r"[-+]?\d+,\d+([eE][-+]?\d+)?")
QUOTED = re.compile(r'"[^"]*"')
FRAMES: dict[str, tuple[str, str]] = {
    ".parquet": ("read_parquet", "readers"),
    ".pq": ("read_parquet", "readers"),
    ".feather": ("read_feather", "readers"),
    ".h5": ("read_hdf", "hdf5"),
    ".hdf5": ("read_hdf", "hdf5"),
}
"""The functions of pandas that read a format, and the extra of this package that they need."""


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
    """

    path: Path
    names: list[str]
    values: NDArray[np.float32]
    text: dict[str, list[str]]
    index: list[str] | None
    notes: list[str]

    def __len__(self) -> int:
        return len(self.values)


def read_foreign(
    path: Path,
    *,
    header_rows: int | None = None,
    name_row: int = 1,
    as_text: Callable[[str], bool] = lambda name: False,
) -> ForeignTable:
    """Returns the table in a file, whose format its name tells.

    Args:
        path: The file.
        header_rows: How many rows name the columns of a text file; None: as its cells suggest.
        name_row: Which of them has the names to use, from 1.
        as_text: Whether the column with a name is text even if it holds numbers.

    Raises:
        DataError: The file cannot be read, or is no such table.
    """
    try:
        suffixes = [suffix.lower() for suffix in path.suffixes]
        last = suffixes[-1] if suffixes else ""
        if last in FRAMES:
            return _from_frame(path, _read_frame(path, *FRAMES[last]), as_text)
        if last == ".h5ad":
            return _from_anndata(path)
        if last in (".xlsx", ".xls", ".ods"):
            problem = "this is a spreadsheet: save its sheet as CSV (UTF-8) and import that"
            raise DataError(problem, path)
        return _TextFile(path, header_rows, name_row, as_text).read()
    except UnicodeDecodeError as error:
        problem = f"its text is not UTF-8 ({error.reason}): save or convert it as UTF-8"
        raise DataError(problem, path) from error
    except (OSError, EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it ends too early"
        raise DataError(f"the file cannot be read: {reason}", path) from error


def _read_frame(path: Path, function: str, extra: str) -> pd.DataFrame:
    try:
        frame = getattr(pd, function)(path)
    except ImportError as error:
        problem = f"reading it needs a package ({error}): pip install 'candle-p1[{extra}]'"
        raise DataError(problem, path) from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"pandas cannot read it: {error}", path) from error
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"it holds a {type(frame).__name__}, not a table", path)
    return frame


def _from_frame(path: Path, frame: pd.DataFrame, as_text: Callable[[str], bool]) -> ForeignTable:
    """Returns what a DataFrame holds; its index is one unless it only counts the rows."""
    counts = isinstance(frame.index, pd.RangeIndex) and frame.index.name is None
    index = None if counts else ["" if pd.isna(name) else str(name) for name in frame.index]
    names = [
        " ".join(map(str, name if isinstance(name, tuple) else [name]))
        for name in cast("list[Any]", frame.columns.tolist())
    ]
    kinds = [
        pd.api.types.is_numeric_dtype(kind) and not as_text(name)
        for name, kind in zip(names, frame.dtypes, strict=True)
    ]
    numbers = [i for i, is_number in enumerate(kinds) if is_number]
    text = {
        names[i]: ["" if pd.isna(value) else str(value) for value in frame.iloc[:, i]]
        for i, is_number in enumerate(kinds)
        if not is_number
    }
    values = frame.iloc[:, numbers].to_numpy(np.float32, na_value=np.nan)
    return ForeignTable(path, [names[i] for i in numbers], values, text, index, [])


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
    matrix = data.X.toarray() if hasattr(data.X, "toarray") else data.X
    if matrix is None:
        raise DataError("it has no matrix X", path)
    text = {
        str(name): ["" if pd.isna(value) else str(value) for value in column]
        for name, column in data.obs.items()
    }
    notes = ["its matrix X, with the columns of obs as text"]
    names, index = [*map(str, data.var_names)], [*map(str, data.obs_names)]
    return ForeignTable(path, names, np.asarray(matrix, np.float32), text, index, notes)


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
    header_rows: int | None
    name_row: int
    as_text: Callable[[str], bool]

    def read(self) -> ForeignTable:
        number, separator, rows = self._first_rows()
        width = max(map(len, rows))
        num_headers = self._num_headers(rows)
        if not 1 <= self.name_row <= num_headers:
            problem = f"there is no header row {self.name_row}, only {num_headers}"
            raise DataError(problem, self.path, number)
        header, body = rows[self.name_row - 1], rows[num_headers:]
        if not body:
            raise DataError("there are no rows below the header", self.path, number)
        if width > len(header) and not any(row[-1] for row in body):
            problem = "the rows end with a separator, but the header does not: add or remove it"
            raise DataError(problem, self.path, number + num_headers)
        if len(header) == width - 1:  # as R writes it: the column of names has none
            header = ["", *header]
        names = [name.strip() for name in header]
        is_comma = separator != "," and any(
            COMMA_NUMBER.fullmatch(cell) for row in body for cell in row[1:]
        )
        decimal = "," if is_comma else "."
        if len(names) != width:
            problem = f"the header has {len(names):,} names, but a row has {width:,} fields"
            raise DataError(problem, self.path, number)
        is_text = [
            name == "" or self.as_text(name) or self._is_text(column, body, decimal)
            for column, name in enumerate(names)
        ]
        notes = [f"fields separated by {separator!r}", f"{num_headers} header row"]
        notes[-1] += f"s, of which row {self.name_row} names the columns" * (num_headers > 1)
        notes += [f"decimal {decimal!r}"] * is_comma
        frame = self._parse(num_headers, separator, decimal, is_text)
        numbers = [i for i in range(width) if not is_text[i]]
        values = frame[numbers].to_numpy(np.float32)
        index = None if names[0] else [*frame[0]]
        text = {names[i]: [*frame[i]] for i in range(width) if is_text[i] and names[i]}
        return ForeignTable(self.path, [names[i] for i in numbers], values, text, index, notes)

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yields the lines that are rows, with their numbers."""
        opener = OPENERS.get(self.path.suffix.lower(), open)
        stream = opener(self.path) if opener is not open else self.path.open("rb")
        with stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines:
            is_gct = False
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.startswith(GCT):
                    is_gct = True
                elif not (
                    line.startswith(COMMENTS) or not line.strip() or (is_gct and number == 2)
                ):
                    yield number, line

    def _first_rows(self) -> tuple[int, str, list[list[str]]]:
        """Returns the number of the first line, the separator, and the first rows."""
        numbered = self._lines()
        first = list(islice(numbered, 2))
        if not first:
            raise DataError("the file has no rows", self.path)
        number, lines = first[0][0], [line for _, line in first]
        bare = [QUOTED.sub("", line) for line in lines]
        counts = {each: min(line.count(each) for line in bare) for each in SEPARATORS}
        separator = max(counts, key=lambda each: counts[each])
        if not counts[separator]:
            problem = "the fields are separated by none of tab, comma, semicolon and bar"
            raise DataError(problem, self.path, number)
        num = min(max(SAMPLE_FIELDS // counts[separator], MIN_SAMPLE), MAX_SAMPLE)
        lines += [line for _, line in islice(numbered, num + MAX_HEADER_ROWS - 2)]
        rows = list(csv.reader(lines, delimiter=separator))
        return number, separator, [[cell.strip() for cell in row] for row in rows]

    def _num_headers(self, rows: Sequence[Sequence[str]]) -> int:
        """Returns how many rows name the columns: those above numbers, or without a name."""
        if self.header_rows is not None:
            return self.header_rows
        first_body = next((i for i, row in enumerate(rows) if i and _has_numbers(row[1:])), 1)
        num = 1
        while num < min(first_body, MAX_HEADER_ROWS) or (num < len(rows) and not rows[num][0]):
            num += 1
        return num

    @staticmethod
    def _is_text(column: int, rows: Sequence[Sequence[str]], decimal: str) -> bool:
        cells = (row[column] for row in rows if column < len(row))
        return any(_is_word(cell.replace(decimal, ".")) for cell in cells)

    def _parse(
        self, num_skipped: int, separator: str, decimal: str, is_text: Sequence[bool]
    ) -> pd.DataFrame:
        lines = self._whole_lines(num_skipped, separator, len(is_text))
        kinds: Any = {i: str if text else np.float32 for i, text in enumerate(is_text)}
        missing: Any = {i: [*MISSING] for i, text in enumerate(is_text) if not text}
        try:
            frame = pd.read_csv(
                _Stream(lines),
                sep=separator,
                decimal=decimal,
                header=None,
                names=range(len(is_text)),
                index_col=False,
                dtype=kinds,
                na_values=missing,
                keep_default_na=False,
                skipinitialspace=True,
                low_memory=False,
            )
        except (ValueError, pd.errors.ParserError) as error:
            self._explain(num_skipped, separator, decimal, is_text)
            raise DataError(f"pandas cannot read it: {error}", self.path) from error
        return frame

    def _whole_lines(self, num_skipped: int, separator: str, width: int) -> Iterator[str]:
        """Yields the rows below the header.

        Raises:
            DataError: One has another number of fields; pandas would fill it up.
        """
        for number, line in islice(self._lines(), num_skipped, None):
            num = line.count(separator) + 1
            if num != width and '"' in line:
                num = len(next(csv.reader([line], delimiter=separator)))
            if num != width:
                problem = f"the row has {num:,} fields, but the header has {width:,}"
                raise DataError(problem, self.path, number)
            yield line

    def _explain(
        self, num_skipped: int, separator: str, decimal: str, is_text: Sequence[bool]
    ) -> None:
        """Raises DataError with the first cell that is text among numbers."""
        for number, line in islice(self._lines(), num_skipped, None):
            row = next(csv.reader([line], delimiter=separator))
            for column, cell in enumerate(row):
                if not is_text[column] and _is_word(cell.strip().replace(decimal, ".")):
                    problem = f"{cell!r} is not a number, as the cells above it are: correct it"
                    raise DataError(problem, self.path, number, column + 1)


class _Stream(io.TextIOBase):
    """Lines as a file to read from."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self._left = lines, ""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> str:
        if size is None or size < 0:
            return self._left + "".join(self._lines)
        parts, length = [self._left], len(self._left)
        while length < size and (line := next(self._lines, "")):
            parts.append(line)
            length += len(line)
        text = "".join(parts)
        self._left = text[size:]
        return text[:size]

    def __next__(self) -> str:  # type: ignore[override]
        line, self._left = self._left or next(self._lines), ""
        return line


def _has_numbers(cells: Sequence[str]) -> bool:
    return any(cell and (not _is_word(cell) or COMMA_NUMBER.fullmatch(cell)) for cell in cells)


def _is_word(cell: str) -> bool:
    """Whether a cell is neither a number nor missing."""
    if cell in MISSING:
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False
