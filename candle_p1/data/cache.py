"""Tables cached as binary files, which a later load only has to check and map.

The format is in candle_p1.data.cache_file. A cache that does not match its source is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock

from candle_p1.data.cache_file import (
    PARTIAL,
    NoCacheError,
    UnfitCacheError,
    describe_source,
    header_problem,
    read_content,
    read_header,
    write_cache,
)
from candle_p1.data.cooperative import read_together
from candle_p1.data.loading import GIB, Loading
from candle_p1.data.source import open_together
from candle_p1.data.table import CsvLayout, Table
from candle_p1.distributed.comm import SerialCommunicator, agree, on_first_rank
from candle_p1.errors import DataError
from candle_p1.instrument.phases import region

SUFFIX = ".table"


def read_cached(path: Path, layout: CsvLayout, loading: Loading) -> Table:
    """Reads a table from its cache, which is first made if none matches; collective.

    Returns:
        The table. A single process maps the file, and changes go to a private copy; several ranks
        on a node read it into memory that they share.

    Raises:
        DataError: The source cannot be read, or the cache cannot be written; the same on all ranks.
        SetupError: There is no directory for caches; the same on all ranks.
    """
    comm = loading.comm
    with open_together(path, comm) as opened, ExitStack() as stack:
        source = on_first_rank(comm, describe_source, opened, layout)
        file = on_first_rank(comm, lambda: _cache_path(loading.cache.path, source))
        cache = _Cache(file, source, loading)
        table = cache.load(loading.notify)
        if table is not None:
            return table
        lock = filelock.FileLock(file.with_suffix(".lock"))

        def lock_and_look() -> bool:
            """Returns whether another job has made the cache by the time the lock is held."""
            with _writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                lock.acquire()
                stack.callback(lock.release)
                return header_problem(file, source) is None

        if on_first_rank(comm, lock_and_look):
            table = cache.load()
        if table is None:
            here = replace(loading, open_source=lambda *_: nullcontext(opened))
            table = read_together(path, layout, here)
            on_first_rank(comm, cache.write, table)
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
    loading: Loading

    def load(self, notify: Callable[[str], None] | None = None) -> Table | None:
        """Returns the table; None, on all ranks, if any of them finds the cache unusable.

        Raises:
            DataError: A node's copy cannot be written or removed; the same on all ranks.
        """
        comm, directory = self.loading.comm, self.loading.cache.stage_directory
        copy = directory / self.file.name if directory else None
        is_staged = False
        try:
            header, first_byte = on_first_rank(comm, read_header, self.file, self.source)
            is_missing = comm.local_rank == 0 and bool(copy and header_problem(copy, self.source))
            is_staged = copy is not None and not comm.any(is_missing)
            path = copy if copy and is_staged else self.file
            table = read_content(path, header, first_byte, self.loading, on_each_node=is_staged)
        except UnfitCacheError as error:  # on all ranks
            if copy and is_staged:
                agree(comm, self._remove, copy)
            if notify and comm.rank == 0 and not isinstance(error, NoCacheError):
                notify(f"{self.file}: {error}; the cache will be rebuilt")
            return None
        if copy and not is_staged:
            agree(comm, self._stage, copy, table)
        if comm.rank == 0:
            with suppress(OSError):  # the directory may be read-only
                os.utime(self.file)
            self.loading.cache.in_use.add(self.file)
        return table

    def _remove(self, copy: Path) -> None:
        if self.loading.comm.local_rank == 0:
            with _writing(copy):
                copy.unlink(missing_ok=True)

    def _stage(self, copy: Path, table: Table) -> None:
        """Writes this node's copy, which another job may be doing meanwhile."""
        if self.loading.comm.local_rank == 0:
            with _writing(copy), region("stage"):
                copy.parent.mkdir(parents=True, exist_ok=True)
                with filelock.FileLock(copy.with_suffix(".lock")):
                    if header_problem(copy, self.source):
                        write_cache(copy, table, self.source, self.loading.num_threads)

    def write(self, table: Table) -> None:
        """Writes the cache, if it fits within the limit; the lock must be held.

        Raises:
            DataError: It cannot be written.
        """
        with region("write"), _writing(self.file):
            if self._make_room(table.values.nbytes):
                write_cache(self.file, table, self.source, self.loading.num_threads)
                self.loading.cache.in_use.add(self.file)

    def _make_room(self, num_bytes: int) -> bool:
        """Removes caches, the least recently used first, until a new one is within the limit.

        Returns False, and removes none, if it does not fit beside those that this run uses.
        """
        settings, notify = self.loading.cache, self.loading.notify or (lambda text: None)
        limit_bytes = settings.limit_bytes
        if not limit_bytes:
            return True
        limit = f"the limit for all caches (cache_limit) is {limit_bytes / GIB:.3g} GiB"
        caches = _by_use(settings.path)
        total = num_bytes + sum(size for _, size, _ in caches)
        others = [(size, path) for _, size, path in caches if path not in settings.in_use]
        if total - sum(size for size, _ in others) > limit_bytes:
            notify(f"{self.source['path']} ({num_bytes / GIB:.3g} GiB) is not cached: {limit}")
            return False
        for size, path in others:
            if total > limit_bytes:
                total -= size
                path.unlink(missing_ok=True)
                notify(f"{path} was removed: {limit}")
        return True


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Makes a DataError of what keeps the body from writing a cache."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter: no locks there
        raise DataError(
            f"the cache cannot be written ({getattr(error, 'strerror', None) or error}): use"
            " --cache_dir to name a directory with enough space, or choose another --loader",
            path,
        ) from error


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
