"""Reading a benchmark's files, and describing them for the record."""

from __future__ import annotations

import csv
import hashlib
import json
import pickle
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.directory import data_directory, sha256_of_all, synthetic_facts
from candle_p1.data.loaders import read_table
from candle_p1.data.shared import agree_on_sharing, sharers
from candle_p1.data.source import GIB, TOGETHER, CacheSettings, Loading, file_state, open_together
from candle_p1.data.table import CsvLayout, Table
from candle_p1.distributed.comm import Communicator, SerialCommunicator
from candle_p1.errors import DataError, SetupError
from candle_p1.files import content_sha256, files_at, read_json, write_atomically
from candle_p1.instrument import reading
from candle_p1.instrument.reading import ReadLog
from candle_p1.records.rank_stats import Seconds
from candle_p1.records.types import NameMatch

Content = TypeVar("Content")
_BROKEN = (csv.Error, zipfile.BadZipFile, pickle.UnpicklingError)
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, *_BROKEN)
"""What functions that read files raise if a file is not what they expect."""


@dataclass(frozen=True)
class FileSet:
    """The files of a run.

    Attributes:
        paths: The paths of files, or of directories of files, by role, such as "train" and "test".
        states: The `file_state` of each file before it was read, by role.
        synthetic: Whether any of them was generated, according to their manifests.
        sha256: The SHA-256 of files, by role, as far as it need not be computed.
    """

    paths: Mapping[str, Path]
    states: Mapping[str, list[tuple[int, int, int]]]
    synthetic: bool
    sha256: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, paths: Mapping[str, Path]) -> FileSet:
        """Returns the files at these paths, as they are now."""
        states = {role: _states(path) for role, path in paths.items()}
        return cls(paths, states, any(map(synthetic_facts, paths.values())))


class Reader:
    """Reads the files of a run, by default in this process alone, and records what it read.

    Tables are read by `read`, other files by `load`. A file that a benchmark opens in another way,
    such as one that stays open during training, is recorded too, but without the time that reading
    takes; its path is ``reader.files.paths[role]``.

    Attributes:
        files: The files.
        load_s: The time taken by each file that `read` or `load` has read, by role.
        table_s: The same for tables, which `read` has read.
        digests: The SHA-256 of the values of each file as read, by role; see `digest`.
        matrix_bytes: The memory that the numbers of all files take.
        sizes: The sizes of the files that `load` and `load_each` have read, by role and name.
        reads: When this rank read the bytes of each table, by role; see `ReadLog`.
        joins: How well names match by which files were joined; see `candle_p1.data.names`.
        warnings: What the user should know about the files.
    """

    def __init__(self, files: FileSet, loading: Loading | None = None) -> None:
        self.files, self.loading = files, loading or Loading()
        self.matrix_bytes = 0
        self.sizes: dict[str, dict[str, int]] = {}
        self.load_s: dict[str, float] = {}
        self.table_s: dict[str, float] = {}
        self.digests: dict[str, str] = {}
        self.reads: dict[str, ReadLog] = {}
        self.joins: list[NameMatch] = []
        self.warnings: list[str] = []
        self._tables: dict[str, Table] = {}
        self._arrays: dict[str, list[NDArray[Any]]] = {}
        self._shapes: dict[str, tuple[int, int | None]] = {}

    def read(self, role: str, layout: CsvLayout | None = None) -> Table:
        """Returns the table in the file with a role; collective if read_table is."""
        self.reads[role] = ReadLog()
        start = time.perf_counter()
        with reading.active(self.reads[role]):
            table = self.read_table(role, layout or CsvLayout())
        self.load_s[role] = self.table_s[role] = time.perf_counter() - start
        self.matrix_bytes += table.values.nbytes
        self._tables[role] = table
        self._shapes[role] = (len(table), table.values.shape[1] + len(table.text))
        return table

    def read_table(self, role: str, layout: CsvLayout) -> Table:
        """Returns what `read` does, and only that; for other ways of reading to be measured."""
        return read_table(self.files.paths[role], self.loading, layout)

    def load(self, role: str, read: Callable[[Path], Content]) -> Content:
        """Returns what a function such as ``numpy.load`` makes of the file with a role.

        Every rank reads for itself. NumPy arrays, also in a tuple, list or dictionary, count as
        values: all ranks must read the same. Those mapped into memory do not, because computing
        their digest would read all of them.

        Raises:
            DataError: The file cannot be read, or has not the content that the function expects.
        """
        (content,) = self._load(role, [self.files.paths[role]], read)
        return content

    def load_each(
        self, role: str, read: Callable[[Path], Content], pattern: str = "*"
    ) -> list[Content]:
        """Returns what a function makes of each file of the directory with a role.

        The files are those that match the pattern, in the order of their names. Otherwise like
        `load`.

        Raises:
            DataError: The path is not a directory, or no file in it matches; or see `load`.
        """
        directory = self.files.paths[role]
        if not directory.is_dir():
            raise DataError(f"not a directory of files {pattern}", directory)
        paths = files_at(directory, pattern)
        if not paths:
            raise DataError(f"the directory has no files {pattern}", directory)
        return self._load(role, paths, read)

    def _load(
        self, role: str, paths: Sequence[Path], read: Callable[[Path], Content]
    ) -> list[Content]:
        start, contents = time.perf_counter(), []
        for path in paths:
            with open_together(path, SerialCommunicator()) as source:
                try:
                    contents.append(read(path))
                except _UNREADABLE as error:
                    raise DataError(f"the file cannot be read: {error}", path) from error
                finally:
                    source.check()
        self.load_s[role] = time.perf_counter() - start
        self.sizes[role] = {path.name: path.stat().st_size for path in paths}
        arrays = list(_arrays_in(contents))
        self.matrix_bytes += sum(array.nbytes for array in arrays)
        if arrays:
            self._arrays[role] = arrays
        if arrays and len(paths) == 1:
            self._shapes[role] = (len(np.atleast_1d(arrays[0])), None)
        return contents

    def warn(self, text: str) -> None:
        """Tells the user and the record something about the files."""
        self.warnings.append(text)
        if self.loading.notify:
            self.loading.notify(text)

    @property
    def loader(self) -> str:
        """The loader's method; "benchmark" if there is no table, so that the benchmark reads."""
        return self.loading.method if self.table_s else "benchmark"

    def digest(self) -> None:
        """Computes the digests of the values; must be called before they are scaled; collective."""
        for role, table in self._tables.items():
            node = sharers(table.values)
            self.digests[role] = node.broadcast(table.sha256() if node.rank == 0 else "")
        for role, arrays in self._arrays.items():
            digest = hashlib.sha256()
            for array in arrays:
                digest.update(f"{array.dtype.str} {array.shape}".encode())
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            self.digests[role] = digest.hexdigest()
        self._tables.clear()
        self._arrays.clear()

    def describe(self) -> dict[str, dict[str, Any]]:
        """Returns each file's path, size and digests, and its shape if it is known, by role.

        Files whose digest is not known are read once more.
        """
        described = self.identify()
        for role, path in self.files.paths.items():
            sha256 = states = None
            with suppress(OSError):  # it may be gone
                sha256 = self.files.sha256.get(role) or (
                    sha256_of_all({each.name: file_sha256(each) for each in files_at(path)})
                    if path.is_dir()
                    else file_sha256(path)
                )
                states = _states(path)
            if states != self.files.states[role]:
                sha256 = None
                self.warn(
                    f"{path}: it was changed after it was read: the record has no digest of it"
                )
            described[role]["sha256"] = sha256
        return described

    def identify(self) -> dict[str, dict[str, Any]]:
        """Returns what `describe` does, without the digests of the files' bytes."""
        described = {}
        for role, path in self.files.paths.items():
            states = self.files.states[role]
            num_rows, num_columns = self._shapes.get(role, (None, None))
            described[role] = {
                "path": str(path),
                "num_files": len(states) if path.is_dir() else None,
                "file_bytes": sum(num_bytes for num_bytes, *_ in states),
                "num_rows": num_rows,
                "num_columns": num_columns,
                "values_sha256": self.digests.get(role),
            }
        return described


def describe_together(
    reader: Reader, comm: Communicator, start_s: float
) -> dict[str, dict[str, Any]]:
    """Returns what `describe` does, with the times of all ranks, on rank 0; else {}; collective.

    Args:
        reader: What this rank has read.
        comm: The ranks.
        start_s: When the run began, by time.perf_counter.
    """
    gathered = comm.gather(
        (reader.load_s, {role: log.since_zero() for role, log in reader.reads.items()})
    )
    if gathered is None:
        return {}
    described = reader.describe()
    for role, facts in described.items():
        if all(role in load_s for load_s, _ in gathered):
            facts["load"] = Seconds.over([load_s[role] for load_s, _ in gathered])
        log = reader.reads.get(role)
        if log is not None and log.zero_s is not None:  # so it was read by all ranks together
            of_ranks = [reads[role] for _, reads in gathered]
            facts["reading"] = reading.summarize_reading(of_ranks, log.zero_s - start_s)
    return described


def _arrays_in(content: Any) -> Iterator[NDArray[Any]]:
    """Yields the arrays of numbers, or of text of fixed length, that are in memory."""
    if isinstance(content, np.ndarray):
        if not isinstance(content, np.memmap) and content.dtype.kind not in "OT":
            yield content
    elif isinstance(content, tuple | list | dict):
        for each in content.values() if isinstance(content, dict) else content:
            yield from _arrays_in(each)


def loading(
    params: Mapping[str, Any],
    comm: Communicator,
    num_threads: int,
    notify: Callable[[str], None] | None = None,
) -> Loading:
    """Returns how a run with these parameters reads its files; collective."""

    def directory(name: str) -> Path | None:
        return Path(params[name]).expanduser().absolute() if params[name] else None

    cache = CacheSettings(
        directory("cache_dir"), int(params["cache_limit"] * GIB), directory("stage_dir")
    )
    warning = None
    if params["loader"] in TOGETHER:
        comm, warning = agree_on_sharing(comm)
    warnings = () if warning is None else (warning,)
    return Loading(params["loader"], comm, num_threads, cache, notify, warnings=warnings)


def _states(path: Path) -> list[tuple[int, int, int]]:
    return [file_state(each.stat()) for each in files_at(path)]


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, remembered by its path and state."""
    key = ":".join(map(str, (path.resolve(), *file_state(path.stat()))))
    memory: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError, SetupError):
        memory = dict(read_json(data_directory() / "digests.json"))
    if not isinstance(memory.get(key), str):
        memory[key] = content_sha256(path)
        with suppress(OSError, SetupError):  # there may be none, or a read-only one
            memory_path = data_directory() / "digests.json"
            memory_path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(memory_path, json.dumps(memory, indent=1))
    return memory[key]
