"""Reading wide CSV files into float32 matrices, by several methods of one signature.

- original: ``pandas.read_csv`` with its defaults, as the CANDLE benchmarks had it.
- chunked: the paper's section 5: chunks of 2,000,000 rows, ``low_memory=False``, concatenated.

The methods give bit-identical tables and the same errors.
"""

from __future__ import annotations

import csv
import hashlib
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from candle_p1.errors import DataError, ParameterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pandas as pd
    from numpy.typing import NDArray

PAPER_CHUNK_ROWS = 2_000_000
MAX_SHOWN_CHARS = 40
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class CsvLayout:
    """What is known of a file before it is read.

    Attributes:
        header: Whether the first line holds the columns' names.
        text_columns: The names of the columns that hold text; the others hold numbers.
        separator: One character.
        missing: What stands for a number that is missing; by default none may be.
        num_columns: The fields every row must have; None takes the first line's.
        label_column: The field that holds the class, for messages; None if there is none.
    """

    header: bool = False
    text_columns: tuple[str, ...] = ()
    separator: str = ","
    missing: tuple[str, ...] = ()
    num_columns: int | None = None
    label_column: int | None = None


@dataclass(frozen=True)
class TextColumn:
    """A column of text.

    Attributes:
        names: The distinct values, sorted.
        codes: int32, shape (rows,): each row's index into `names`.
    """

    names: list[str]
    codes: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.codes)

    def values(self) -> list[str]:
        """Returns the value of each row."""
        return [self.names[code] for code in self.codes]


@dataclass(frozen=True)
class Table:
    """The content of a file.

    Attributes:
        values: float32, shape (rows, columns of numbers), C-contiguous.
        columns: The names of these columns; empty without a header.
        text: The columns of text, by name.
    """

    values: NDArray[np.float32]
    columns: list[str] = field(default_factory=list)
    text: dict[str, TextColumn] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    def sha256(self) -> str:
        """Returns the SHA-256 of the values in row order, then of names and codes of the text."""
        digest = hashlib.sha256(self.values.data)
        for name, column in self.text.items():
            digest.update("\0".join([name, *column.names]).encode())
            digest.update(column.codes.tobytes())
        return digest.hexdigest()


def read_table(path: Path, method: str, layout: CsvLayout | None = None) -> Table:
    """Reads a CSV file.

    Args:
        path: The file.
        method: A name in READERS.
        layout: What the file looks like; None is fields of numbers, separated by commas, no header.

    Returns:
        The table. Numbers that are missing, where they may be, are NaN.

    Raises:
        DataError: The file is missing or empty, lacks a column, has rows of unequal length, or a
            field that is empty, no finite number or out of float32's range; with line and field.
        ParameterError: There is no such method.
    """
    if method not in READERS:
        raise ParameterError(f"loader {method!r}: choose one of {', '.join(READERS)}")
    layout = layout or CsvLayout()
    try:
        if path.stat().st_size == 0:
            raise DataError("the file is empty", path)
        names = _read_header(path, layout) if layout.header else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of mixed types in a column: an error below
            frame = READERS[method](path, _pandas_options(layout))
        table = _to_table(frame, names, layout)
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror}", path) from error
    except ValueError as error:  # also pandas.errors.ParserError and a UnicodeDecodeError
        raise _first_problem(path, layout) or DataError(str(error), path) from error
    num_columns = table.values.shape[1] + len(table.text)
    wrong_width = layout.num_columns is not None and num_columns != layout.num_columns
    if wrong_width or _looks_wrong(table, layout):
        problem = _first_problem(path, layout)
        if problem is not None:
            raise problem
    return table


Options = dict[str, Any]


def _read_original(path: Path, options: Options) -> pd.DataFrame:
    import pandas as pd

    return cast("pd.DataFrame", pd.read_csv(path, **options))


def _read_chunked(path: Path, options: Options) -> pd.DataFrame:
    import pandas as pd

    chunks = pd.read_csv(path, chunksize=PAPER_CHUNK_ROWS, low_memory=False, **options)
    return pd.concat(list(chunks), axis=0)


READERS: dict[str, Callable[[Path, Options], pd.DataFrame]] = {
    "original": _read_original,
    "chunked": _read_chunked,
}


def _pandas_options(layout: CsvLayout) -> Options:
    options: Options = {"header": 0 if layout.header else None}
    if layout.separator != ",":
        options["sep"] = layout.separator
    if layout.text_columns:
        options["dtype"] = dict.fromkeys(layout.text_columns, str)
    if layout.text_columns or layout.missing:
        options |= {"keep_default_na": False, "na_values": list(layout.missing)}
    return options


def _read_header(path: Path, layout: CsvLayout) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        names = next(csv.reader(file, delimiter=layout.separator), [])
    for name in layout.text_columns:
        if name not in names:
            raise DataError(f"the header names no column {name!r}", path, 1)
    return names


def _to_table(frame: pd.DataFrame, names: list[str], layout: CsvLayout) -> Table:
    """Returns the values; a column that is not of its kind raises ValueError."""
    import pandas as pd

    if not isinstance(frame.index, pd.RangeIndex):  # pandas took the first column for names of rows
        raise ValueError("rows have more fields than the header")
    text = {}
    for name in layout.text_columns:
        codes, distinct = pd.factorize(frame.pop(name), sort=True)
        if (codes < 0).any() or "" in distinct:
            raise ValueError(f"a field of {name} is missing")
        text[name] = TextColumn([str(value) for value in distinct], codes.astype(np.int32))
    if not all(dtype.kind in "iuf" for dtype in frame.dtypes):
        raise ValueError("a column holds something else than numbers")
    with np.errstate(over="ignore"):  # what is out of range becomes infinite: an error below
        matrix: NDArray[np.float32] = np.ascontiguousarray(frame.to_numpy(dtype=np.float32))
    return Table(matrix, [name for name in names if name not in text], text)


def _looks_wrong(table: Table, layout: CsvLayout) -> bool:
    """Returns whether there may be no rows, a short one, or a field missing or not finite."""
    values = table.values
    if not len(values):
        return True
    if not values.size:
        return False
    if layout.missing:  # a row that is too short ends with missing values
        return bool(np.isinf(values).any() or np.isnan(values[:, -1]).any())
    with np.errstate(over="ignore", invalid="ignore"):
        return not np.isfinite(values.sum())  # one such field shows in the sum


def _first_problem(path: Path, layout: CsvLayout) -> DataError | None:
    """Reads the file again, slowly, and returns what is wrong with its first unfit field.

    None says that nothing is: the values are finite, and only their sum was not.
    """
    names = _read_header(path, layout) if layout.header else []
    num_columns = layout.num_columns or len(names) or None
    separator = layout.separator.encode()
    missing = {word.encode() for word in layout.missing}
    is_text = [name in layout.text_columns for name in names]
    num_rows = 0
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            fields = line.rstrip(b"\r\n").split(separator)
            if fields == [b""]:
                continue  # pandas skips blank lines
            num_columns = num_columns or len(fields)
            if len(fields) != num_columns:
                cut = "; the file ends within this line" if not line.endswith(b"\n") else ""
                problem = f"{len(fields)} fields where {num_columns} are expected{cut}"
                return DataError(problem, path, line_number)
            if layout.header and line_number == 1:
                continue
            num_rows += 1
            for i, content in enumerate(fields):
                if is_text and is_text[i]:
                    fits = content not in (b"", *missing)
                else:
                    fits = content in missing or _is_finite(content)
                if not fits:
                    return DataError(_describe(content, i, layout), path, line_number, i + 1)
    return None if num_rows else DataError("the file holds no rows", path)


def _describe(content: bytes, index: int, layout: CsvLayout) -> str:
    what = "the label" if index == layout.label_column else "the field"
    if not content.strip():
        return f"{what} is missing"
    shown = content.decode("utf-8", "replace")
    if len(shown) > MAX_SHOWN_CHARS:
        shown = shown[:MAX_SHOWN_CHARS] + "…"
    return f"{what} {shown!r} is not a finite float32 number"


def _is_finite(field: bytes) -> bool:
    try:
        return b"_" not in field and abs(float(field)) <= LARGEST
    except ValueError:
        return False
