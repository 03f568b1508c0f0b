"""A benchmark's files, read by the chosen method, with what the record says of each."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.data.cache import GIB, CacheSettings
from candle_p1.data.csv import Loading, read_table
from candle_p1.data.directory import data_directory
from candle_p1.data.manifest import synthetic_facts
from candle_p1.data.shared import sharers
from candle_p1.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from candle_p1.data.table import CsvLayout, Table
    from candle_p1.distributed.comm import Communicator


@dataclass(frozen=True)
class FileSet:
    """The files of a run, found before they are read.

    Attributes:
        paths: By role, such as "train" and "test".
        synthetic: Whether they were generated.
        sha256: Of the files' bytes, by role, where it is known already.
    """

    paths: Mapping[str, Path]
    synthetic: bool
    sha256: Mapping[str, str]

    @classmethod
    def of(cls, paths: Mapping[str, Path]) -> FileSet:
        """Returns the set of these files, with what a manifest beside them tells."""
        known = {role: synthetic_facts(path) for role, path in paths.items()}
        return cls(
            paths,
            synthetic=any(facts is not None for facts in known.values()),
            sha256={role: facts["sha256"] for role, facts in known.items() if facts is not None},
        )


class Reader:
    """Reads the files of a set and keeps account of it.

    Args:
        files: The files.
        loading: How they are read; None is by this process alone.

    Attributes:
        load_s: The time each file took, by role.
        digests: SHA-256 of each table as read, by role; see `digest`.
        matrix_bytes: What the numbers of all tables take in memory.
    """

    def __init__(self, files: FileSet, loading: Loading | None = None) -> None:
        self.files, self.loading = files, loading or Loading()
        self.matrix_bytes = 0
        self.load_s: dict[str, float] = {}
        self.digests: dict[str, str] = {}
        self._tables: dict[str, Table] = {}
        self._shapes: dict[str, tuple[int, int]] = {}

    def read(self, role: str, layout: CsvLayout | None = None) -> Table:
        """Returns the content of the file of a role; collective, see read_table."""
        start = time.perf_counter()
        table = read_table(self.files.paths[role], self.loading, layout)
        self.load_s[role] = time.perf_counter() - start
        self.matrix_bytes += table.values.nbytes
        self._tables[role] = table
        self._shapes[role] = (len(table), table.values.shape[1] + len(table.text))
        return table

    def digest(self) -> None:
        """Computes the digests of the tables as read; to be called before they are scaled.

        Collective: what the ranks of a node share, one of them computes.
        """
        for role, table in self._tables.items():
            node = sharers(table.values)
            self.digests[role] = node.broadcast(table.sha256() if node.rank == 0 else "")
        self._tables.clear()

    def describe(self) -> dict[str, dict[str, Any]]:
        """Returns, by role, the file's path, bytes and digests, and the table's shape.

        Reads the files once more where their digest is not known.
        """
        return {
            role: {
                "path": str(path),
                "file_bytes": path.stat().st_size,
                "sha256": self.files.sha256.get(role) or file_sha256(path),
                "num_rows": self._shapes[role][0],
                "num_columns": self._shapes[role][1],
                "values_sha256": self.digests[role],
            }
            for role, path in self.files.paths.items()
            if role in self._shapes
        }


def loading(
    params: Mapping[str, Any],
    comm: Communicator,
    num_threads: int,
    notify: Callable[[str], None] | None = None,
) -> Loading:
    """Returns how a run with these parameters reads its files."""

    def directory(name: str) -> Path | None:
        return Path(params[name]).expanduser().absolute() if params[name] else None

    cache = CacheSettings(
        directory("cache_dir"), int(params["cache_limit"] * GIB), directory("stage_dir")
    )
    return Loading(params["loader"], comm, num_threads, cache, notify)


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, remembered by path, size and time of change."""
    status = path.stat()
    key = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    memory_path = data_directory() / "digests.json"
    memory: dict[str, str] = {}
    with suppress(OSError, ValueError):
        memory = json.loads(memory_path.read_text(encoding="utf-8"))
    if key not in memory:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
            memory[key] = digest.hexdigest()
        with suppress(OSError):  # a read-only data directory costs the memory, not the run
            memory_path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(memory_path, json.dumps(memory, indent=1))
    return memory[key]
