"""Reading wide numeric CSV files into float32 matrices, by several methods of one signature.

- original: ``pandas.read_csv`` with its defaults, as the CANDLE benchmarks had it.
- chunked: the paper's section 5: chunks of 2,000,000 rows, ``low_memory=False``, concatenated.

The methods give bit-identical matrices and the same errors.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """What is known of a numeric CSV file before it is read.

    Attributes:
        num_columns: The fields every row must have; None takes the first row's.
        label_column: The field that holds the class, for messages; None if there is none.
    """

    num_columns: int | None = None
    label_column: int | None = None


def read_matrix(path: Path, method: str, layout: CsvLayout | None = None) -> NDArray[np.float32]:
    """Reads a CSV file of numbers without a header.

    Args:
        path: The file; fields separated by commas, every one a finite number.
        method: A name in READERS.
        layout: What the file must look like.

    Returns:
        float32, shape (rows, fields), C-contiguous.

    Raises:
        DataError: The file is missing or empty, rows have unequal numbers of fields, or a field is
            empty or no number; with the line and the field.
        ParameterError: There is no such method.
    """
    if method not in READERS:
        raise ParameterError(f"loader {method!r}: choose one of {', '.join(READERS)}")
    layout = layout or CsvLayout()
    try:
        if path.stat().st_size == 0:
            raise DataError("the file is empty", path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of mixed types in a column: an error below
            matrix = _to_float32(READERS[method](path))
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror}", path) from error
    except ValueError as error:  # also pandas.errors.ParserError and a UnicodeDecodeError
        raise _first_problem(path, layout) or DataError(str(error), path) from error
    wrong_width = layout.num_columns is not None and matrix.shape[1] != layout.num_columns
    with np.errstate(over="ignore", invalid="ignore"):
        total = matrix.sum()
    # A field that is missing or is no finite number shows in the sum.
    if wrong_width or not np.isfinite(total):
        problem = _first_problem(path, layout)
        if problem is not None:
            raise problem
    return matrix


def _read_original(path: Path) -> pd.DataFrame:
    import pandas as pd

    return pd.read_csv(path, header=None)


def _read_chunked(path: Path) -> pd.DataFrame:
    import pandas as pd

    chunks = pd.read_csv(path, header=None, chunksize=PAPER_CHUNK_ROWS, low_memory=False)
    return pd.concat(list(chunks), axis=0, ignore_index=True)


READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "original": _read_original,
    "chunked": _read_chunked,
}


def _to_float32(frame: pd.DataFrame) -> NDArray[np.float32]:
    """Returns the values; a column that is not of numbers raises ValueError."""
    if not all(dtype.kind in "iuf" for dtype in frame.dtypes):
        raise ValueError("a column holds something else than numbers")
    matrix: NDArray[np.float32] = np.ascontiguousarray(frame.to_numpy(dtype=np.float32))
    return matrix


def _first_problem(path: Path, layout: CsvLayout) -> DataError | None:
    """Reads the file again, slowly, and returns what is wrong with its first unfit field.

    None says that nothing is: the values are finite, and only their sum was not.
    """
    num_columns = layout.num_columns
    with path.open("rb") as file:
        line_number, line = 0, b""
        for line_number, line in enumerate(file, start=1):
            fields = line.rstrip(b"\r\n").split(b",")
            if fields == [b""]:
                continue  # pandas skips blank lines
            num_columns = num_columns or len(fields)
            bad = next((i for i, field in enumerate(fields) if not _is_finite(field)), None)
            if len(fields) != num_columns:
                cut = "; the file ends within this line" if not line.endswith(b"\n") else ""
                problem = f"{len(fields)} fields where {num_columns} are expected{cut}"
                return DataError(problem, path, line_number)
            if bad is not None:
                return DataError(_describe(fields[bad], bad, layout), path, line_number, bad + 1)
    if line_number == 0 or num_columns is None:
        return DataError("the file holds no rows", path)
    return None


def _describe(field: bytes, index: int, layout: CsvLayout) -> str:
    what = "the label" if index == layout.label_column else "the field"
    if not field.strip():
        return f"{what} is missing"
    shown = field.decode("utf-8", "replace")
    if len(shown) > MAX_SHOWN_CHARS:
        shown = shown[:MAX_SHOWN_CHARS] + "…"
    return f"{what} {shown!r} is not a finite float32 number"


def _is_finite(field: bytes) -> bool:
    try:
        return b"_" not in field and abs(float(field)) <= LARGEST
    except ValueError:
        return False
