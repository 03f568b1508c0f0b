"""Reading tables by one of several methods, which are named by ``--loader``.

- parallel: each rank of a job reads a part (candle_p1.data.cooperative).
- cached: the same the first time; later, from a binary file (candle_p1.data.cache).

The others read through data frames, every rank the whole file into its own memory. They are the
loaders that the paper compares, and newer libraries:

- original: ``pandas.read_csv`` with its defaults, as in the CANDLE benchmarks.
- chunked: as in the paper's section 5: chunks of 2,000,000 rows, ``low_memory=False``,
  concatenated. The benchmarks' files have fewer rows, so each is a single chunk.
- chunked_rows: chunks of a few rows, each converted before the next is read.
- dask: ``dask.dataframe.read_csv``, with which the paper compares.
- arrow, polars: ``pyarrow.csv.read_csv`` and ``polars.read_csv``.

All methods give bit-identical tables and the same errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.cache import read_cached
from candle_p1.data.cooperative import read_together
from candle_p1.data.source import (
    TOGETHER,
    Head,
    Loading,
    Source,
    is_blank,
    open_together,
    unreadable,
)
from candle_p1.data.table import CsvLayout, Table, TextColumn
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError, ParameterError, SetupError, did_you_mean
from candle_p1.instrument.phases import region

PAPER_CHUNK_ROWS = 2_000_000
CHUNK_ROWS, CHUNK_VALUES = 64, 2_000_000
"""A chunk has at least this many rows (few, with 60,483 columns) and this many values."""
BLOCK_BYTES = 1 << 24
SAMPLE_BYTES = 1 << 22
"""The size of dask's sample, which must contain some whole rows."""
BOOLEANS = b"TtFf"
"""The first letters of what pandas, if told that a column has numbers, takes for 1 and 0."""

Packed = str | None
"""The name of a compression, which all libraries know, or None."""
Part = tuple[NDArray[np.float32], Mapping[str, Iterable[str]]]
"""Some rows: their numbers, shape (rows, columns of numbers), and text by column."""


def _read_by_frame(source: Source, method: str, layout: CsvLayout) -> Table:
    path = source.path
    head, packed = source.read_head(layout), source.compression and source.compression.name
    try:
        with region("read"):
            plain = source.is_plain(head, layout, BOOLEANS if method == "dask" else b"")
        expected = None if plain else read_together(path, layout)
        with region("parse"):  # libraries read while they parse
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about mixed types in a column: an error below
                warnings.filterwarnings("error", "Length of header")  # a row is longer
                parts = list(FRAME_READERS[method](path, layout, head, packed))
            table = _join(parts, head, layout)
    except ImportError as error:
        raise SetupError(
            f"loader {method} needs a library that is not installed ({error}); install"
            " candle-p1[readers], or choose another --loader"
        ) from error
    except DataError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # each library has its own errors
        read_together(path, layout)  # raises an error that names the field
        raise DataError(f"loader {method} cannot read the file: {error}", path) from error
    if table.values.shape[1] + len(table.text) != head.num_columns or _looks_wrong(table, layout):
        expected = read_together(path, layout)  # raises an error that names the field
    if expected and not _is_same(table, expected):
        raise DataError(
            f"loader {method} reads other values than the file has: choose another --loader",
            path,
        )
    return table


def _original(path: Path, layout: CsvLayout, head: Head, packed: Packed) -> Iterator[Part]:
    yield _part(_read_csv(path, layout, packed), layout)


def _chunked(path: Path, layout: CsvLayout, head: Head, packed: Packed) -> Iterator[Part]:
    import pandas as pd

    chunks = _read_csv(path, layout, packed, chunksize=PAPER_CHUNK_ROWS, low_memory=False)
    yield _part(pd.concat(list(chunks), axis=0), layout)


def _chunked_rows(path: Path, layout: CsvLayout, head: Head, packed: Packed) -> Iterator[Part]:
    rows = max(CHUNK_ROWS, CHUNK_VALUES // head.num_columns)
    with _read_csv(path, layout, packed, chunksize=rows, low_memory=False) as chunks:
        for chunk in chunks:
            yield _part(chunk, layout)


def _dask(path: Path, layout: CsvLayout, head: Head, packed: Packed) -> Iterator[Part]:
    import dask.dataframe

    options = _pandas_options(layout, packed)
    # dask would infer types from a sample, in which a column may have only 0, and 0.5 only later.
    # With the types given, pandas reads True as 1.
    names: Sequence[str | int] = head.names or range(head.num_columns)
    types = {name: str if name in layout.text_columns else np.float64 for name in names}
    options |= {"dtype": types, "sample": SAMPLE_BYTES}
    if packed:
        options["blocksize"] = None  # a single one
    yield _part(dask.dataframe.read_csv(path, **options).compute(), layout)


def _arrow(path: Path, layout: CsvLayout, head: Head, packed: Packed) -> Iterator[Part]:
    import pyarrow
    from pyarrow import csv

    names = head.names or [f"f{i}" for i in range(head.num_columns)]
    types = {n: pyarrow.string() if n in layout.text_columns else pyarrow.float64() for n in names}
    table = csv.read_csv(
        pyarrow.input_stream(path, packed),
        csv.ReadOptions(
            autogenerate_column_names=not layout.header,
            block_size=BLOCK_BYTES,
            skip_rows=head.num_blank,
        ),
        csv.ParseOptions(delimiter=layout.separator),
        csv.ConvertOptions(column_types=types, null_values=list(layout.missing)),
    )
    numbers = np.empty((table.num_rows, len(names) - len(layout.text_columns)), np.float32)
    num_missing = 0
    for i, name in enumerate(name for name in names if name not in layout.text_columns):
        numbers[:, i] = table.column(name).to_numpy()
        num_missing += table.column(name).null_count
    _check_missing(numbers, num_missing)
    yield numbers, {name: table.column(name).to_pylist() for name in layout.text_columns}


def _polars(path: Path, layout: CsvLayout, head: Head, packed: Packed) -> Iterator[Part]:
    import polars

    names = head.names or [f"column_{i + 1}" for i in range(head.num_columns)]
    schema = {n: polars.String if n in layout.text_columns else polars.Float64 for n in names}
    frame = polars.read_csv(
        path,
        has_header=layout.header,
        separator=layout.separator,
        schema=schema,
        null_values=list(layout.missing),
        skip_lines=head.num_blank,
    )
    text = {name: frame.get_column(name).to_list() for name in layout.text_columns}
    frame = frame.drop(*layout.text_columns)
    numbers = frame.to_numpy().astype(np.float32)
    _check_missing(numbers, sum(frame.null_count().row(0)) if frame.width else 0)
    yield numbers, text


FRAME_READERS: dict[str, Callable[[Path, CsvLayout, Head, Packed], Iterator[Part]]] = {
    "original": _original,
    "chunked": _chunked,
    "chunked_rows": _chunked_rows,
    "dask": _dask,
    "arrow": _arrow,
    "polars": _polars,
}


def _pandas_options(layout: CsvLayout, packed: Packed) -> dict[str, Any]:
    options: dict[str, Any] = {
        "header": 0 if layout.header else None,
        "compression": packed,
        "index_col": False,  # otherwise, if rows are longer than the header, their names
    }
    if layout.separator != ",":
        options["sep"] = layout.separator
    if layout.text_columns:
        options["dtype"] = dict.fromkeys(layout.text_columns, str)
    if layout.text_columns or layout.missing:
        options |= {"keep_default_na": False, "na_values": list(layout.missing)}
    return options


def _read_csv(path: Path, layout: CsvLayout, packed: Packed, **options: Any) -> Any:
    import pandas as pd

    return pd.read_csv(path, **_pandas_options(layout, packed), **options)


def _part(frame: Any, layout: CsvLayout) -> Part:
    """Returns a frame's values; raises ValueError if a column is not of the expected kind."""
    text = {name: frame.pop(name) for name in layout.text_columns}
    if not all(dtype.kind in "iuf" for dtype in frame.dtypes):
        raise ValueError("a column has values that are not numbers")
    with np.errstate(over="ignore"):  # becomes infinite, which is an error later
        return frame.to_numpy(dtype=np.float32), text


def _check_missing(numbers: NDArray[np.float32], num_missing: int) -> None:
    """Raises ValueError if some fields are not missing but NaN, which the libraries accept."""
    if np.count_nonzero(np.isnan(numbers)) != num_missing:
        raise ValueError("a field is not a number")


def _join(parts: list[Part], head: Head, layout: CsvLayout) -> Table:
    import pandas as pd

    text = {}
    for name in layout.text_columns:
        values = pd.concat([pd.Series(words[name], dtype=object) for _, words in parts])
        codes, distinct = pd.factorize(values, sort=True)
        if (codes < 0).any() or not {"", *layout.missing}.isdisjoint(distinct):
            raise ValueError(f"a field of {name} is missing")
        if head.num_columns == 1 and any(is_blank(value.encode(), "\n") for value in distinct):
            raise ValueError("a line is blank")
        text[name] = TextColumn([str(value) for value in distinct], codes.astype(np.int32))
    numbers = [each for each, _ in parts]
    matrix = np.ascontiguousarray(numbers[0] if len(numbers) == 1 else np.concatenate(numbers))
    return Table(matrix, [name for name in head.names if name not in text], text)


def _is_same(table: Table, other: Table) -> bool:
    texts = [{name: text.values() for name, text in each.text.items()} for each in (table, other)]
    is_same = table.columns == other.columns and texts[0] == texts[1]
    return is_same and np.array_equal(table.values, other.values, equal_nan=True)


def _looks_wrong(table: Table, layout: CsvLayout) -> bool:
    """Returns whether there may be no rows, a short row, or a missing or infinite field."""
    values = table.values
    if not len(values):
        return True
    if not values.size:
        return False
    if layout.missing:  # a short row ends with missing values
        return bool(np.isinf(values).any() or np.isnan(values[:, -1]).any())
    with np.errstate(over="ignore", invalid="ignore"):
        return not np.isfinite(values.sum())  # one such field makes the sum non-finite


READERS = (*TOGETHER, *FRAME_READERS)


def installed_readers() -> list[str]:
    """Returns the names of the readers whose library is installed."""
    libraries = {"dask": "dask", "arrow": "pyarrow", "polars": "polars"}
    return [name for name in READERS if find_spec(libraries.get(name, "numpy"))]


def read_table(path: Path, loading: Loading, layout: CsvLayout | None = None) -> Table:
    """Reads a table; collective over the ranks of `loading` if the method is parallel or cached.

    By default, the file has numbers separated by commas, without a header.

    Returns:
        The table. Missing numbers, if allowed, are NaN. With parallel and cached, the ranks of a
        node share one copy: it is read-only, and candle_p1.data.transforms changes it.

    Raises:
        DataError: The file is missing or empty, lacks a column, or has rows of unequal length or a
            field that is empty, not a finite number or out of float32's range.
        ParameterError: There is no such method.
        SetupError: The method's library is not installed.
    """
    method, layout = loading.method, layout or CsvLayout()
    if method not in READERS:
        raise ParameterError(
            f"loader {method!r}{did_you_mean(method, READERS)}: choose one of {', '.join(READERS)}"
        )
    if method in TOGETHER:
        return (read_cached if method == "cached" else read_together)(path, layout, loading)
    with open_together(path, SerialCommunicator()) as source:
        try:
            return _read_by_frame(source, method, layout)
        finally:
            source.check()  # a library reads what is there when it opens the file
