"""Tables cached as binary files, which a later load only has to check and map.

A cache that does not match its source is rebuilt. It contains, in this order: the numbers, float32,
row by row; the codes of each column of text, int32; a header, as JSON; the digest of the header and
its length; a magic word with the format's version. The header says which file the cache was made
from (path, size, modification time and a digest of samples of its bytes) and how that file was
read, and has a digest of every slab of what precedes it. Thus a cache that is truncated, altered or
made from another file is detected.

The slabs are dealt to the nodes and, within a node, to its ranks, which read and check them in
place, in the memory that the node's ranks share. Then the nodes send each other their slabs, also
in place. If each node has a copy of the file on a disk of its own, its ranks read all slabs.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np
import xxhash

from candle_p1.data.cooperative import read_opened
from candle_p1.data.directory import storing
from candle_p1.data.read_ahead import agree_on_zero
from candle_p1.data.shared import NodeArray, allocate
from candle_p1.data.source import GIB, Loading, Source, fill, open_together
from candle_p1.data.table import CsvLayout, Table, TextColumn
from candle_p1.distributed.comm import SerialCommunicator, agree, on_first_rank
from candle_p1.errors import CandleError, DataError
from candle_p1.instrument import reading
from candle_p1.instrument.phases import region
from candle_p1.scaling import share_bounds

SUFFIX, PARTIAL = ".table", ".partial"
Bytes = Any  # NDArray[np.uint8], which typeshed does not accept as a buffer

MAGIC = b"CANDLEP1 cache 2"
TRAILER = struct.Struct("<16sQ16s")
"""Digest of the header, its length in bytes, magic word."""
SLAB_BYTES = 8 << 20
ROUND_SLABS = 128
"""How many slabs are sent at a time: their 1 GiB is less than MPI can count."""


_writing = partial(
    storing,
    remedy="use --cache_dir to name a directory with enough space, or choose another --loader",
    what="the cache cannot be written",
)


class UnfitCacheError(CandleError):
    """A cache file that must not be used; the message says why, as a clause."""


class NoCacheError(UnfitCacheError):
    """There is no such file."""


class Header(NamedTuple):
    """What a cache file says about itself.

    Attributes:
        source: What it was made from; see `describe_source`.
        shape: Rows and columns of the numbers.
        columns: The names of the columns of numbers.
        text: The distinct values of each column of text.
        slabs_xxh3: The digest of each slab of the content.
    """

    source: dict[str, Any]
    shape: tuple[int, int]
    columns: list[str]
    text: dict[str, list[str]]
    slabs_xxh3: list[str]

    @property
    def part_bytes(self) -> list[int]:
        """The sizes of the numbers and of each column of text."""
        num_rows, num_columns = self.shape
        return [4 * num_rows * num_columns, *(4 * num_rows for _ in self.text)]


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
        key = hashlib.sha256(json.dumps([source["path"], source["layout"]]).encode()).hexdigest()
        name = f"{Path(source['path']).name}-{key[:16]}{SUFFIX}"  # one for each path and layout
        file = on_first_rank(comm, lambda: loading.cache.path / name)
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
            table = read_opened(opened, layout, loading)
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
            source = read_header(path).source
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

        def remove_copy() -> None:
            if copy and comm.local_rank == 0:
                with _writing(copy):
                    copy.unlink(missing_ok=True)

        try:
            header = on_first_rank(comm, read_header, self.file, self.source)
            is_missing = comm.local_rank == 0 and bool(copy and header_problem(copy, self.source))
            is_staged = copy is not None and not comm.any(is_missing)
            path = copy if copy and is_staged else self.file
            table = read_content(path, header, self.loading, on_each_node=is_staged)
        except UnfitCacheError as error:  # on all ranks
            if is_staged:
                agree(comm, remove_copy)
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


def _by_use(directory: Path) -> list[tuple[float, int, Path]]:
    """Returns (time of last use, bytes, path) of all caches, the least recently used first."""
    found = []
    for path in directory.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):  # another process may just have removed it
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    return sorted(found)


def describe_source(source: Source, layout: CsvLayout) -> dict[str, Any]:
    """Returns the description of a file that a cache of it must contain.

    Raises:
        DataError: The file cannot be read, or begins otherwise than the layout has it.
    """
    source.read_head(layout)  # a cache may be older than what is refused by now
    return {
        "path": str(source.path.resolve()),
        "bytes": source.num_bytes,
        "changed_ns": source.state[1],
        "samples_xxh3": source.digest(whole=False),
        "layout": json.loads(json.dumps(asdict(layout))),
    }


def write_cache(path: Path, table: Table, source: dict[str, Any], num_threads: int = 1) -> None:
    """Writes a table's cache atomically; only one process may do so at a time.

    Raises:
        OSError: It cannot be written; nothing is left behind.
    """
    codes = [column.codes for column in table.text.values()]
    temporary = path.with_name(f".{path.name}{PARTIAL}")
    try:
        with temporary.open("w+b") as file, ThreadPoolExecutor(num_threads) as pool:
            for part in (table.values, *codes):
                raw: Bytes = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                file.write(raw)
            file.flush()
            content: Bytes = np.memmap(file, np.uint8, "r")
            bounds = range(0, len(content), SLAB_BYTES)
            slabs = (content[start : start + SLAB_BYTES] for start in bounds)
            digests = [*pool.map(xxhash.xxh3_64_hexdigest, slabs)]
            text = {name: column.names for name, column in table.text.items()}
            num_rows, num_columns = table.values.shape
            described = Header(source, (num_rows, num_columns), table.columns, text, digests)
            header = json.dumps(described._asdict()).encode()
            file.write(header)
            file.write(TRAILER.pack(xxhash.xxh3_128_digest(header), len(header), MAGIC))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_header(path: Path, source: dict[str, Any] | None = None) -> Header:
    """Returns the header of a cache, made from this source if one is given.

    Raises:
        UnfitCacheError: The header is missing or damaged, the file does not have the right size, or
            it was made from something else.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            raise UnfitCacheError("it is not a file")
        with path.open("rb") as file:
            end = max(os.fstat(file.fileno()).st_size - TRAILER.size, 0)
            file.seek(end)
            trailer = file.read()
            if not trailer.endswith(MAGIC) or len(trailer) != TRAILER.size:
                raise UnfitCacheError("it is truncated, or of another version")
            digest, num_bytes, _ = TRAILER.unpack(trailer)
            file.seek(max(end - num_bytes, 0))
            text = file.read(min(num_bytes, end))
    except FileNotFoundError as error:
        raise NoCacheError("there is none") from error
    except OSError as error:
        raise UnfitCacheError(f"it cannot be read: {error.strerror}") from error
    if xxhash.xxh3_128_digest(text) != digest:
        raise UnfitCacheError("its header is damaged")
    header = Header(**json.loads(text))
    if end - num_bytes != sum(header.part_bytes):
        raise UnfitCacheError("it does not have the size that its header says")
    different = [key for key in source or () if source and source[key] != header.source[key]]
    if different:
        reasons = {
            "bytes": "the size of its source has changed",
            "changed_ns": "its source has been modified since",
            "samples_xxh3": "the content of its source has changed",
        }
        raise UnfitCacheError(reasons.get(different[0], "it was made from something else"))
    return header


def header_problem(path: Path, source: dict[str, Any]) -> str | None:
    """Returns why a cache's header does not match a source; None if it matches."""
    try:
        read_header(path, source)
    except UnfitCacheError as error:
        return str(error)
    return None


def read_content(path: Path, header: Header, loading: Loading, *, on_each_node: bool) -> Table:
    """Returns the table in a cache file; collective.

    Only ranks that have a slab to read open the file.

    Args:
        path: The file, of this node if `on_each_node`.
        header: Its header, on all ranks.
        loading: Who needs the table.
        on_each_node: Whether each node reads a file of its own.

    Raises:
        DataError: There is no space for the content; the same on all ranks.
        UnfitCacheError: Some rank cannot read it, or found it damaged; the same on all ranks.
    """
    comm, node = loading.comm, loading.comm.local
    num_nodes, num_bytes = 1 if on_each_node else comm.num_nodes, sum(header.part_bytes)
    slabs = range(len(header.slabs_xxh3))
    rounds = [
        _divide(slabs[i : i + ROUND_SLABS], num_nodes) for i in range(0, len(slabs), ROUND_SLABS)
    ]
    of_node = (of_nodes[comm.node if num_nodes > 1 else 0] for of_nodes in rounds)
    mine = [slab for each in of_node for slab in _divide(each, node.size)[node.rank]]

    def make_room() -> NodeArray | None:
        """Returns no memory for a single process with a whole file, which it can map."""
        if node.size == 1 and num_nodes == 1:
            return None
        return allocate((num_bytes,), np.uint8, node, loading.notify)

    array, problem = agree(comm, make_room), None
    content: Bytes = np.empty(0, np.uint8) if array is None else array.array
    agree_on_zero(comm)
    try:
        with region("read"):
            if mine:
                content = _read_slabs(path, header, mine, array, loading.num_threads)
    except (UnfitCacheError, OSError, ValueError) as error:  # the last: it is empty by now
        problem = str(error)
    try:
        with region("communicate"):
            if found := comm.first(problem):
                raise UnfitCacheError(found[1])
            for of_nodes in rounds if num_nodes > 1 else ():
                begin = of_nodes[0].start * SLAB_BYTES
                round_content = content[begin : of_nodes[-1].stop * SLAB_BYTES]
                stops = [min(s.stop * SLAB_BYTES - begin, len(round_content)) for s in of_nodes]
                comm.share_between_nodes(round_content, [*pairwise([0, *stops])])
            node.barrier()
    finally:
        if array is not None:
            content = array.keep(num_bytes)
    values, *codes = np.split(content, np.cumsum(header.part_bytes)[:-1])
    text = {
        name: TextColumn(names, column.view(np.int32))
        for (name, names), column in zip(header.text.items(), codes, strict=True)
    }
    return Table(values.view(np.float32).reshape(header.shape), header.columns, text)


def _divide(slabs: range, num: int) -> list[range]:
    return [slabs[slice(*share_bounds(len(slabs), each, num))] for each in range(num)]


def _read_slabs(
    path: Path, header: Header, slabs: Sequence[int], array: NodeArray | None, num_threads: int
) -> Bytes:
    """Reads and checks some slabs; returns the array that they are in: `array` if it is given."""
    log = reading.current()
    with path.open("rb") as file, ThreadPoolExecutor(num_threads) as pool:
        if array is None:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            content: Bytes = np.frombuffer(mapping, np.uint8)[: sum(header.part_bytes)]
        else:
            content = array.array

        def check(slab: int) -> None:
            start = slab * SLAB_BYTES
            into = content[start : start + SLAB_BYTES]
            with log.noted(len(into)):
                if array is not None and not fill(file.fileno(), into.data, start):
                    raise UnfitCacheError("it was changed while it was read")
                if xxhash.xxh3_64_hexdigest(into) != header.slabs_xxh3[slab]:
                    raise UnfitCacheError("its content does not match its digest")

        list(pool.map(check, slabs))
    return content
