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
    """What a table can be converted to.

    Attributes:
        library: What it needs.
        write: Writes a table, which was read from a file of text, to a new path.
        read: Returns the table at a path, of which it is told the layout and how to load text.
        suffix: That of its paths.
    """

    library: str
    write: Callable[[Table, Path, Path], None]
    read: Callable[[Path, CsvLayout, Loading], Table]
    suffix: str = ""


def _write_parquet(table: Table, text: Path, path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(table.values, columns=table.columns or None)
    frame.columns = frame.columns.astype(str)
    words = pd.DataFrame({name: column.values() for name, column in table.text.items()})
    pd.concat([words, frame], axis="columns").to_parquet(path)


def _read_parquet(path: Path, layout: CsvLayout, how: Loading) -> Table:
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


def _write_hdf5(table: Table, text: Path, path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in _arrays(table).items():
            file[name] = array


def _read_hdf5(path: Path, layout: CsvLayout, how: Loading) -> Table:
    import h5py

    with h5py.File(path) as file:
        return _table(lambda name: file[name][...], layout)


def _write_npy(table: Table, text: Path, path: Path) -> None:
    path.mkdir()
    for name, array in _arrays(table).items():
        np.save(path / f"{name}.npy", array)


def _read_npy(path: Path, layout: CsvLayout, how: Loading) -> Table:
    return _table(lambda name: np.array(np.load(path / f"{name}.npy", mmap_mode="r")), layout)


def _pack(open_packed: Callable[[Path], Any], table: Table, text: Path, path: Path) -> None:
    with text.open("rb") as unpacked, open_packed(path) as packed:
        shutil.copyfileobj(unpacked, packed, 1 << 20)


def _open_zst(path: Path) -> Any:
    import pyarrow

    return pyarrow.output_stream(path, "zstd")


def _read_packed(path: Path, layout: CsvLayout, how: Loading) -> Table:
    return read_table(path, how, layout)


_open_gz = partial(gzip.open, mode="wb", compresslevel=6)  # as gzip
FORMATS = {
    "parquet": Format("pyarrow", _write_parquet, _read_parquet),
    "hdf5": Format("h5py", _write_hdf5, _read_hdf5),
    "npy": Format("numpy", _write_npy, _read_npy),
    "parallel-gz": Format("zlib", partial(_pack, _open_gz), _read_packed, ".gz"),
    "parallel-zst": Format("pyarrow", partial(_pack, _open_zst), _read_packed, ".zst"),
}
"""By the name of the method; what is compressed is read by the loader parallel."""
SAMPLE = Table(np.eye(2, 3, dtype=np.float32))


def is_installed(method: str) -> bool:
    """Returns whether what a method needs is installed."""
    return bool(find_spec(FORMATS[method].library))


class ConvertedReader(Reader):
    """Reads what it has written to a directory before, when it `converts` a benchmark's tables."""

    def __init__(
        self, files: FileSet, loading: Loading, method: str, directory: Path, converts: bool = False
    ) -> None:
        super().__init__(files, loading)
        self._format, self._directory, self._converts = FORMATS[method], directory, converts
        if converts:
            directory.mkdir(parents=True, exist_ok=True)
        else:  # a sample, so that imports are not timed later
            text = Path(sys.argv[1]) / f"sample.{loading.comm.rank}"
            text.write_text("1,0,0\n0,1,0\n")
            path = text.with_name(f"converted.{text.name}{self._format.suffix}")
            self._format.write(SAMPLE, text, path)
            self._format.read(path, CsvLayout(), Loading())

    def read_table(self, role: str, layout: CsvLayout) -> Table:
        """Returns a table, and converts it if it was told to."""
        path = self._directory / f"{role}{self._format.suffix}"
        if not self._converts:
            return self._format.read(path, layout, self.loading)
        table = super().read_table(role, layout)
        self._format.write(table, self.files.paths[role], path)
        return table
