"""Tables kept as binary files, which a later load only has to check and map.

A cache file holds, in this order: a magic word with the format's version; the digest of the header;
the header's length; the header, JSON; padding; the numbers, float32, row by row; the codes of each
column of text, int32. The header says which file it was made from (path, size, time of change and a
digest of samples of its bytes) and how it was read, and has a digest of every slab of what follows:
a file that is cut, altered or of another source does not pass, and is made anew.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
import xxhash

from candle_p1.data.cooperative import read_together
from candle_p1.data.directory import data_directory
from candle_p1.data.shared import allocate
from candle_p1.data.table import CsvLayout, Table, TextColumn
from candle_p1.distributed.comm import Attempt
from candle_p1.errors import DataError
from candle_p1.instrument.phases import part
from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from candle_p1.distributed.comm import Communicator

    Bytes = Any  # NDArray[np.uint8], which typeshed does not take for a buffer

MAGIC = b"CANDLEP1 cache 1"
FIXED = struct.Struct("<16s16sQ")
"""Magic word, digest of the header, length of the header in bytes."""
ALIGNMENT = 4096
SLAB_BYTES = 8 << 20
SAMPLE_BYTES, NUM_SAMPLES = 1 << 16, 16
SUFFIX = ".table"
PARTIAL = ".partial"
GIB = 2**30

Notify = Callable[[str], None]


@dataclass(frozen=True)
class CacheSettings:
    """Where caches are.

    Attributes:
        directory: None is ``cache`` in the data directory.
        limit_bytes: What all of them together may take; those used longest ago go first. 0 is no
            limit.
        stage_directory: A directory of each node's own, to which a cache is copied once; None is
            not to copy.
    """

    directory: Path | None = None
    limit_bytes: int = 0
    stage_directory: Path | None = None

    @property
    def path(self) -> Path:
        """The directory."""
        return self.directory or data_directory() / "cache"


class UnfitCacheError(Exception):
    """A cache file that is not to be used; the message says why."""


def read_cached(
    path: Path,
    layout: CsvLayout,
    comm: Communicator,
    settings: CacheSettings,
    *,
    num_threads: int = 1,
    notify: Notify | None = None,
) -> Table:
    """Reads a table from its cache, which is made first where there is none that fits; collective.

    Args:
        path: The source.
        layout: What the source looks like.
        comm: The ranks.
        settings: Where caches are.
        num_threads: Threads of each rank.
        notify: Is told, on rank 0, why a cache is made anew.

    Returns:
        The table: one process maps the file and copies what it changes; several ranks of a node
        read it into memory that they share.

    Raises:
        DataError: The source cannot be read, or the cache cannot be written; the same on all ranks.
    """

    def find() -> tuple[Path, dict[str, Any]] | None:
        """Returns the cache and its source; makes rank 0 hold the lock where there is none."""
        if comm.rank != 0:
            return None
        source = describe_source(path, layout)
        return cache_path(settings.path, source), source

    found = comm.broadcast(Attempt(find).agree(comm))
    assert found is not None
    file, source = found
    table = _load(file, source, comm, settings, num_threads, notify)
    if table is not None:
        return table
    lock = filelock.FileLock(file.with_suffix(".lock"))

    def acquire() -> bool:
        """Returns whether the cache is there meanwhile: another job may have made it."""
        if comm.rank != 0:
            return False
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            return _problem(file, source) is None
        except (OSError, NotImplementedError) as error:  # the latter: no locks on this file system
            raise _cannot_write(file, error) from error

    try:
        if comm.broadcast(Attempt(acquire).agree(comm)):
            table = _load(file, source, comm, settings, num_threads, notify=None)
            if table is not None:
                return table
        table = read_together(path, layout, comm, num_threads=num_threads, notify=notify)
        fresh = table

        def write() -> None:
            if comm.rank == 0:
                with part("write"):
                    _make_room(settings, fresh, notify)
                    write_cache(file, fresh, source, num_threads)

        Attempt(write).agree(comm)
        return table
    finally:
        if lock.is_locked:
            lock.release()


def describe_source(path: Path, layout: CsvLayout) -> dict[str, Any]:
    """Returns what a cache must have been made from.

    Raises:
        DataError: The file cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            for i in range(NUM_SAMPLES):
                place = i * max(status.st_size - SAMPLE_BYTES, 0) // (NUM_SAMPLES - 1)
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, place))
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror}", path) from error
    return {
        "path": str(path.resolve()),
        "bytes": status.st_size,
        "changed_ns": status.st_mtime_ns,
        "samples_xxh3": digest.hexdigest(),
        "layout": json.loads(json.dumps(asdict(layout))),
    }


def cache_path(directory: Path, source: dict[str, Any]) -> Path:
    """Returns the cache file of a source: one for each path and layout."""
    key = json.dumps([source["path"], source["layout"]]).encode()
    name = Path(source["path"]).name
    return directory / f"{name}-{hashlib.sha256(key).hexdigest()[:16]}{SUFFIX}"


def write_cache(path: Path, table: Table, source: dict[str, Any], num_threads: int = 1) -> None:
    """Writes a table's cache, atomically.

    Raises:
        DataError: It cannot be written; nothing is left behind.
    """
    parts = [_bytes_of(table.values), *(_bytes_of(c.codes) for c in table.text.values())]
    slabs = [part[bounds] for part in parts for bounds in _slabs(len(part))]
    with ThreadPoolExecutor(num_threads) as pool:
        digests = list(pool.map(xxhash.xxh3_64_hexdigest, slabs))
    header = json.dumps(
        {
            "source": source,
            "shape": table.values.shape,
            "columns": table.columns,
            "text": {name: column.names for name, column in table.text.items()},
            "slabs_xxh3": digests,
        }
    ).encode()
    fixed = FIXED.pack(MAGIC, xxhash.xxh3_128_digest(header), len(header))
    padding = b"\0" * (_first_byte(len(header)) - FIXED.size - len(header))
    partial = path.with_name(f".{path.name}{PARTIAL}")  # one at a time: the lock is held
    try:
        with partial.open("wb") as file:
            for content in (fixed, header, padding, *slabs):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


@dataclass(frozen=True)
class CacheFile:
    """One cache, as a listing shows it.

    Attributes:
        path: The file.
        num_bytes: Its size.
        used_s: When it was last used, in s since the epoch.
        source: What it was made from; None if that cannot be read.
        problem: Why it will be made anew; None if it fits its source, as far as the header tells.
    """

    path: Path
    num_bytes: int
    used_s: float
    source: dict[str, Any] | None
    problem: str | None


def list_caches(directory: Path) -> Iterator[CacheFile]:
    """Yields the caches of a directory, those used longest ago first."""
    found = []
    for path in directory.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):  # another process has just removed it
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    for used_s, num_bytes, path in sorted(found):
        source = problem = None
        try:
            source = dict(_read_header(path)["source"])
            now = describe_source(Path(source["path"]), CsvLayout()) | {"layout": source["layout"]}
            problem = _problem(path, now)
        except (UnfitCacheError, DataError) as error:
            problem = str(error)
        yield CacheFile(path, num_bytes, used_s, source, problem)


def clear_caches(directory: Path) -> None:
    """Removes all caches of a directory, and what was left of unfinished ones.

    Raises:
        DataError: One cannot be removed.
    """
    for pattern in (f"*{SUFFIX}", f".*{SUFFIX}{PARTIAL}"):
        for path in directory.glob(pattern):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise DataError(f"cannot be removed: {error.strerror}", path) from error


def _load(
    file: Path,
    source: dict[str, Any],
    comm: Communicator,
    settings: CacheSettings,
    num_threads: int,
    notify: Notify | None,
) -> Table | None:
    """Returns the cache's table; None, on all ranks, if any of them finds it unfit."""
    local = _stage(file, source, comm, settings.stage_directory)
    problem, header = None, {}
    try:
        header = _check_header(local, source)
    except UnfitCacheError as error:
        problem = str(error)
    table = None
    if not any(comm.allgather(problem)):
        table, problem = _read_slabs(local, header, comm, num_threads, notify)
    problems = [text for text in comm.allgather(problem) if text]
    if not problems:
        if comm.rank == 0:
            with suppress(OSError):  # a directory that is only read keeps no account of use
                os.utime(file)
        return table
    if local != file and comm.local_rank == 0:
        local.unlink(missing_ok=True)
    if notify and comm.rank == 0 and file.exists():
        notify(f"{file}: {problems[0]}; it is made anew")
    return None


def _read_slabs(
    path: Path,
    header: dict[str, Any],
    comm: Communicator,
    num_threads: int,
    notify: Notify | None,
) -> tuple[Table | None, str | None]:
    """Returns the table, whole or what this rank has read of it; and what is wrong with it."""
    num_rows, num_columns = header["shape"]
    first = _first_byte(header["num_bytes"])
    sizes = [4 * num_rows * num_columns, *(4 * num_rows for _ in header["text"])]
    node = comm.local
    # By all ranks: a node of one rank needs no memory to share, and agrees with the others.
    array = Attempt(
        lambda: allocate((sum(sizes),), np.uint8, node, notify) if node.size > 1 else None
    ).agree(comm)
    if array is None:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole: Bytes = np.frombuffer(mapping, np.uint8)[first:]
        read = _keep
    else:
        whole = array.array
        file_number = os.open(path, os.O_RDONLY)

        def read(into: Bytes, start: int) -> None:
            if os.preadv(file_number, [memoryview(into)], first + start) != len(into):
                raise UnfitCacheError("it was changed while it was read")

    starts = np.cumsum([0, *sizes])
    slabs = [
        (int(start) + bounds.start, int(start) + bounds.stop, digest)
        for start, bounds, digest in zip(
            [start for start, size in zip(starts, sizes, strict=False) for _ in _slabs(size)],
            [bounds for size in sizes for bounds in _slabs(size)],
            header["slabs_xxh3"],
            strict=True,
        )
    ]
    mine = slabs[slice(*share_bounds(len(slabs), node.rank, node.size))]

    def check(slab: tuple[int, int, str]) -> bool:
        start, stop, digest = slab
        read(whole[start:stop], start)
        return bool(xxhash.xxh3_64_hexdigest(whole[start:stop]) == digest)

    problem = None
    try:
        with part("read"), ThreadPoolExecutor(num_threads) as pool:
            if not all(pool.map(check, mine)):
                problem = "its content does not fit its digest"
    except UnfitCacheError as error:
        problem = str(error)
    if array is not None:
        os.close(file_number)
        node.barrier()
        whole = array.keep(len(whole))
    values = whole[: sizes[0]].view(np.float32).reshape(num_rows, num_columns)
    text = {
        name: TextColumn(names, whole[start : start + 4 * num_rows].view(np.int32))
        for (name, names), start in zip(header["text"].items(), starts[1:], strict=False)
    }
    return Table(values, header["columns"], text), problem


def _keep(into: Bytes, start: int) -> None:
    """Reads nothing: mapped memory is filled as it is looked at."""


def _stage(file: Path, source: dict[str, Any], comm: Communicator, directory: Path | None) -> Path:
    """Returns the node's own copy of a cache, which one rank makes; collective.

    The cache itself, where there is no directory for copies or nothing to copy.
    """
    if directory is None:
        return file
    copy = directory / file.name

    def copy_once() -> Path:
        if _problem(file, source) is not None:
            return file
        if _problem(copy, source) is None:
            return copy
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(copy.with_suffix(".lock")):
                if _problem(copy, source) is not None:
                    partial = copy.with_name(f".{copy.name}{PARTIAL}")
                    shutil.copyfile(file, partial)
                    partial.replace(copy)
        except OSError as error:
            raise _cannot_write(copy, error) from error
        return copy

    staged = Attempt(lambda: copy_once() if comm.local_rank == 0 else None).agree(comm)
    path = comm.local.broadcast(staged)
    assert path is not None
    return path


def _problem(path: Path, source: dict[str, Any]) -> str | None:
    """Returns why a cache does not fit a source, as far as its header tells; None if it does."""
    try:
        _check_header(path, source)
    except UnfitCacheError as error:
        return str(error)
    return None


def _check_header(path: Path, source: dict[str, Any]) -> dict[str, Any]:
    header = _read_header(path)
    made_from = header["source"]
    different = [key for key in source if source[key] != made_from.get(key)]
    if different:
        reasons = {
            "bytes": "its source has another size now",
            "changed_ns": "its source was changed later",
            "samples_xxh3": "its source has other content now",
        }
        raise UnfitCacheError(reasons.get(different[0], "it was made from something else"))
    return header


def _read_header(path: Path) -> dict[str, Any]:
    """Returns the header, with its own length as num_bytes.

    Raises:
        UnfitCacheError: There is none, it is damaged, or the file does not have the size it says.
    """
    try:
        with path.open("rb") as file:
            fixed = file.read(FIXED.size)
            if len(fixed) < FIXED.size:
                raise UnfitCacheError("it is cut short")
            magic, digest, num_bytes = FIXED.unpack(fixed)
            if magic != MAGIC:
                raise UnfitCacheError("it is no cache of this version")
            size = os.fstat(file.fileno()).st_size
            text = file.read(min(num_bytes, size))
            padding = file.read(_first_byte(len(text)) - FIXED.size - len(text))
    except OSError as error:
        raise UnfitCacheError(f"it cannot be read: {error.strerror}") from error
    if xxhash.xxh3_128_digest(text) != digest or len(text) != num_bytes or any(padding):
        raise UnfitCacheError("its header is damaged")
    header: dict[str, Any] = json.loads(text)
    header["num_bytes"] = num_bytes
    num_rows, num_columns = header["shape"]
    expected = _first_byte(num_bytes) + 4 * num_rows * (num_columns + len(header["text"]))
    if size != expected:
        raise UnfitCacheError(f"it has {size} bytes where {expected} are expected")
    return header


def _make_room(settings: CacheSettings, table: Table, notify: Notify | None) -> None:
    """Removes caches, those used longest ago first, until one more fits under the limit."""
    directory = settings.path
    if not settings.limit_bytes:
        return
    caches = sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    total = table.values.nbytes + sum(path.stat().st_size for path in caches)
    for path in caches:
        if total <= settings.limit_bytes:
            break
        total -= path.stat().st_size
        path.unlink()
        if notify:
            notify(f"{path} is removed: caches may take {settings.limit_bytes / GIB:g} GiB")


def _cannot_write(path: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or error
    return DataError(
        f"the cache cannot be written ({reason}): name a directory with room by --cache_dir, or"
        " take another --loader",
        path,
    )


def _bytes_of(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _slabs(num_bytes: int) -> Sequence[slice]:
    return [
        slice(start, min(start + SLAB_BYTES, num_bytes))
        for start in range(0, num_bytes, SLAB_BYTES)
    ]


def _first_byte(num_header_bytes: int) -> int:
    """Returns where the numbers begin."""
    return -(-(FIXED.size + num_header_bytes) // ALIGNMENT) * ALIGNMENT
