"""What tables can be converted to before they are loaded: other formats, and compressed text."""

from __future__ import annotations

import gzip
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.loaders import read_table
from candle_p1.data.reader import FileSet, Reader
from candle_p1.data.source import Loading
from candle_p1.data.table import CsvLayout, Table, TextColumn


class Format(NamedTuple):
    """A binary format.

    Attributes:
        library: What it needs.
        write: Writes a table to a new path.
        read: Returns the table at a path, whose layout the function is told.
    """

    library: str
    write: Callable[[Table, Path], None]
    read: Callable[[Path, CsvLayout], Table]


def _write_parquet(table: Table, path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(table.values, columns=table.columns or None)
    frame.columns = frame.columns.astype(str)
    text = pd.DataFrame({name: column.values() for name, column in table.text.items()})
    pd.concat([text, frame], axis="columns").to_parquet(path)


def _read_parquet(path: Path, layout: CsvLayout) -> Table:
    import pandas as pd

    frame, text = pd.read_parquet(path), {}
    for name in layout.text_columns:
        codes, names = pd.factorize(frame.pop(name), sort=True)
        text[name] = TextColumn([*names], codes.astype(np.int32))
    columns = [*frame.columns] if layout.header else []
    return Table(np.ascontiguousarray(frame.to_numpy(np.float32)), columns, text)


def _arrays(table: Table) -> dict[str, NDArray[Any]]:
    """Returns a table as arrays, of numbers or of bytes."""

    def encoded(words: list[str]) -> NDArray[Any]:
        return np.array([word.encode() for word in words], "S")

    found = {"values": table.values, "columns": encoded(table.columns)}
    for name, column in table.text.items():
        found |= {f"codes of {name}": column.codes, f"names of {name}": encoded(column.names)}
    return found


def _table(read: Callable[[str], NDArray[Any]], layout: CsvLayout) -> Table:
    """Returns the table of which a function returns the arrays of `_arrays`."""

    def decoded(name: str) -> list[str]:
        return [word.decode() for word in read(name).tolist()]

    text = {
        name: TextColumn(decoded(f"names of {name}"), read(f"codes of {name}"))
        for name in layout.text_columns
    }
    return Table(read("values"), decoded("columns"), text)


def _write_hdf5(table: Table, path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in _arrays(table).items():
            file[name] = array


def _read_hdf5(path: Path, layout: CsvLayout) -> Table:
    import h5py

    with h5py.File(path) as file:
        return _table(lambda name: file[name][...], layout)


def _write_npy(table: Table, path: Path) -> None:
    path.mkdir()
    for name, array in _arrays(table).items():
        np.save(path / f"{name}.npy", array)


def _read_npy(path: Path, layout: CsvLayout) -> Table:
    return _table(lambda name: np.array(np.load(path / f"{name}.npy", mmap_mode="r")), layout)


FORMATS = {
    "parquet": Format("pyarrow", _write_parquet, _read_parquet),
    "hdf5": Format("h5py", _write_hdf5, _read_hdf5),
    "npy": Format("numpy", _write_npy, _read_npy),
}


def _open_zst(path: Path) -> Any:
    import pyarrow

    return pyarrow.output_stream(path, "zstd")


PACKS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "parallel-gz": ("zlib", ".gz", partial(gzip.open, mode="wb", compresslevel=6)),  # as gzip
    "parallel-zst": ("pyarrow", ".zst", _open_zst),
}
"""The library, the suffix, and what opens a file to be compressed, for the loader parallel."""
CONVERTED = (*FORMATS, *PACKS)
SAMPLE = Table(np.eye(2, 3, dtype=np.float32))


def is_installed(method: str) -> bool:
    """Returns whether what a method of CONVERTED needs is installed."""
    return bool(find_spec((FORMATS.get(method) or PACKS[method])[0]))


class Converter(Reader):
    """Reads a benchmark's tables, and writes what a method of CONVERTED loads to a directory."""

    def __init__(self, files: FileSet, loading: Loading, method: str, directory: Path) -> None:
        super().__init__(files, loading)
        self._method, self._directory = method, directory
        directory.mkdir(parents=True, exist_ok=True)

    def read_table(self, role: str, layout: CsvLayout) -> Table:
        """Returns a table, and converts it."""
        table = super().read_table(role, layout)
        if self._method in FORMATS:
            FORMATS[self._method].write(table, self._directory / role)
        else:
            _, suffix, open_packed = PACKS[self._method]
            made = self._directory / f"{role}{suffix}"
            with self.files.paths[role].open("rb") as text, open_packed(made) as packed:
                shutil.copyfileobj(text, packed, 1 << 20)
        return table


class ConvertedReader(Reader):
    """Reads what a `Converter` has written."""

    def __init__(self, files: FileSet, loading: Loading, method: str, directory: Path) -> None:
        super().__init__(files, loading)
        self._method, self._directory = method, directory
        path = Path(sys.argv[1]) / f"sample.{loading.comm.rank}"
        if method in FORMATS:  # so that imports are not timed later
            FORMATS[method].write(SAMPLE, path)
            FORMATS[method].read(path, CsvLayout())
        else:
            with PACKS[method][2](path) as packed:
                packed.write(b"1,2\n")
            read_table(path, Loading())

    def read_table(self, role: str, layout: CsvLayout) -> Table:
        """Returns a table."""
        if self._method in FORMATS:
            return FORMATS[self._method].read(self._directory / role, layout)
        path = self._directory / f"{role}{PACKS[self._method][1]}"
        return read_table(path, self.loading, layout)
