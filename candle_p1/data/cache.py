"""Tables cached as binary files, which a later load only has to check and map.

The format is in candle_p1.data.cache_file. A cache that does not match its source is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from candle_p1.data.cache_file import (
    PARTIAL,
    UnfitCacheError,
    check_header,
    describe_source,
    header_problem,
    read_header,
    write_cache,
)
from candle_p1.data.cache_read import CacheContent, CacheReader
from candle_p1.data.cache_stage import cannot_write, stage_cache
from candle_p1.data.cooperative import read_together
from candle_p1.data.directory import data_directory
from candle_p1.data.source import open_together
from candle_p1.data.table import CsvLayout, Table
from candle_p1.distributed.comm import SerialCommunicator, on_first_rank
from candle_p1.errors import DataError
from candle_p1.instrument.phases import part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from candle_p1.distributed.comm import Communicator

SUFFIX = ".table"
GIB = 2**30

Notify = Callable[[str], None]


@dataclass(frozen=True)
class CacheSettings:
    """Where caches are.

    Attributes:
        directory: None means ``cache`` in the data directory.
        limit_bytes: The space that all caches together may take; the least recently used are
            removed first. 0 means no limit.
        stage_directory: A directory local to each node, to which a cache is copied once; None
            means that it is not copied.
        in_use: Those that this run has made or read, which it does not remove; on rank 0.
    """

    directory: Path | None = None
    limit_bytes: int = 0
    stage_directory: Path | None = None
    in_use: set[Path] = field(default_factory=set, compare=False)

    @property
    def path(self) -> Path:
        """The directory."""
        return self.directory or data_directory() / "cache"


def read_cached(
    path: Path,
    layout: CsvLayout,
    comm: Communicator,
    settings: CacheSettings,
    *,
    num_threads: int = 1,
    notify: Notify | None = None,
) -> Table:
    """Reads a table from its cache, which is first made if none matches; collective.

    `notify` is called, on rank 0, with the reason why a cache is rebuilt.

    Returns:
        The table. A single process maps the file, and changes go to a private copy; several ranks
        on a node read it into memory that they share.

    Raises:
        DataError: The source cannot be read, or the cache cannot be written; the same on all ranks.
    """
    with open_together(path, comm) as opened, ExitStack() as stack:
        source = on_first_rank(lambda: describe_source(opened, layout), comm)
        file = comm.broadcast(_cache_path(settings.path, source))
        cache = _Cache(file, source, comm, settings, num_threads, notify)
        table = cache.load()
        if table is not None:
            return table
        lock = filelock.FileLock(file.with_suffix(".lock"))

        def lock_and_look() -> bool:
            """Returns whether another job has made the cache by the time the lock is held."""
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                lock.acquire()
                stack.callback(lock.release)
                return header_problem(file, source) is None
            except (OSError, NotImplementedError) as error:  # the latter: no locks there
                raise cannot_write(file, error) from error

        made = on_first_rank(lock_and_look, comm)
        table = replace(cache, notify=None).load() if made else None
        if table is None:
            table = read_together(
                path,
                layout,
                comm,
                num_threads=num_threads,
                notify=notify,
                open_source=lambda *_: nullcontext(opened),
            )
            on_first_rank(partial(cache.write, table), comm)
        return table


@dataclass(frozen=True)
class CacheFile:
    """One cache, as listed.

    Attributes:
        path: The file.
        num_bytes: Its size.
        used_s: When it was last used, in s since the epoch.
        source: What it was made from; None if that cannot be read.
        problem: Why it will be rebuilt; None if it matches its source, as far as its header says.
    """

    path: Path
    num_bytes: int
    used_s: float
    source: dict[str, Any] | None
    problem: str | None


def list_caches(directory: Path) -> Iterator[CacheFile]:
    """Yields the caches of a directory, the least recently used first."""
    for used_s, num_bytes, path in _by_use(directory):
        source = problem = None
        try:
            source = read_header(path)[0].source
            with open_together(Path(source["path"]), SerialCommunicator()) as opened:
                now = describe_source(opened, CsvLayout(**source["layout"]))
            problem = header_problem(path, now)
        except (UnfitCacheError, DataError, TypeError) as error:  # the last: another layout
            problem = str(error)
        yield CacheFile(path, num_bytes, used_s, source, problem)


def clear_caches(directory: Path) -> None:
    """Removes all caches of a directory, and the remains of unfinished ones.

    Raises:
        DataError: One cannot be removed.
    """
    for pattern in (f"*{SUFFIX}", f".*{SUFFIX}{PARTIAL}"):
        for path in directory.glob(pattern):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise DataError(f"the cache cannot be removed: {error.strerror}", path) from error


@dataclass(frozen=True)
class _Cache:
    """The cache of one table, with what is needed to use it. `load` is collective."""

    file: Path
    source: dict[str, Any]
    comm: Communicator
    settings: CacheSettings
    num_threads: int
    notify: Notify | None

    def load(self) -> Table | None:
        """Returns the table; None, on all ranks, if any of them finds the cache unusable."""
        directory = self.settings.stage_directory
        copy: Path | None = None
        try:
            content = self._check_header()
            if directory:
                copy = directory / self.file.name
                stage_cache(self.file, copy, content.file_bytes, self.source, self.comm)
            table = CacheReader(
                content,
                self.comm,
                on_each_node=copy is not None,
                num_threads=self.num_threads,
                notify=self.notify,
            ).read(copy or self.file)
        except UnfitCacheError as error:
            if copy and self.comm.local_rank == 0:
                copy.unlink(missing_ok=True)
            if self.notify and self.comm.rank == 0 and self.file.exists():
                self.notify(f"{self.file}: {error}; the cache will be rebuilt")
            return None
        if self.comm.rank == 0:
            with suppress(OSError):  # the directory may be read-only
                os.utime(self.file)
            self.settings.in_use.add(self.file)
        return table

    def _check_header(self) -> CacheContent:
        """Returns what the cache holds, which rank 0 finds out; collective.

        Raises:
            UnfitCacheError: It cannot be used; the same on all ranks.
        """
        content = problem = None
        if self.comm.rank == 0:
            try:
                content = CacheContent(*check_header(self.file, self.source))
            except UnfitCacheError as error:
                problem = str(error)
        content, problem = self.comm.broadcast((content, problem))
        if content is None:
            raise UnfitCacheError(problem)
        return content

    def write(self, table: Table) -> None:
        """Writes the cache, if it fits within the limit; the lock must be held.

        Raises:
            DataError: It cannot be written.
        """
        with part("write"):
            try:
                if self._make_room(table.values.nbytes):
                    write_cache(self.file, table, self.source, self.num_threads)
                    self.settings.in_use.add(self.file)
            except OSError as error:
                raise cannot_write(self.file, error) from error

    def _make_room(self, num_bytes: int) -> bool:
        """Removes caches, the least recently used first, until a new one is within the limit.

        Returns False, and removes none, if it does not fit beside those that this run uses.
        """
        limit_bytes, notify = self.settings.limit_bytes, self.notify or (lambda text: None)
        if not limit_bytes:
            return True
        limit = f"the limit for all caches (cache_limit) is {limit_bytes / GIB:.3g} GiB"
        caches = _by_use(self.settings.path)
        total = num_bytes + sum(size for _, size, _ in caches)
        others = [(size, path) for _, size, path in caches if path not in self.settings.in_use]
        if total - sum(size for size, _ in others) > limit_bytes:
            notify(f"{self.source['path']} ({num_bytes / GIB:.3g} GiB) is not cached: {limit}")
            return False
        for size, path in others:
            if total > limit_bytes:
                total -= size
                path.unlink(missing_ok=True)
                notify(f"{path} was removed: {limit}")
        return True


def _cache_path(directory: Path, source: dict[str, Any]) -> Path:
    """Returns the cache file of a source: one for each path and layout."""
    key = json.dumps([source["path"], source["layout"]]).encode()
    name = Path(source["path"]).name
    return directory / f"{name}-{hashlib.sha256(key).hexdigest()[:16]}{SUFFIX}"


def _by_use(directory: Path) -> list[tuple[float, int, Path]]:
    """Returns (time of last use, bytes, path) of all caches, the least recently used first."""
    found = []
    for path in directory.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):  # another process may just have removed it
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    return sorted(found)
