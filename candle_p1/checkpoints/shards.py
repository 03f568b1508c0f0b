"""The shards of a checkpoint: who writes which rows of which arrays, and how a file becomes safe.

A shard is a safetensors file (https://github.com/huggingface/safetensors#format): the length of the
header, 8 bytes little-endian; the header, JSON, with the type, the shape and the place of every
array; then the arrays' bytes without gaps. The library's own writer would need all arrays in memory
a second time, so the header is made here, and each array is copied once, to its place in the file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from candle_p1.checkpoints.manifest import FileEntry
from candle_p1.distributed.comm import Communicator
from candle_p1.errors import CheckpointError

SMALL_BYTES = 1 << 20
"""Arrays below this size are not split, and no rank writes less, so that files do not get tiny."""

TYPE_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""The name of each type of elements in safetensors files, by its name in NumPy."""
NUMPY_NAMES = {name: numpy_name for numpy_name, name in TYPE_NAMES.items()}
SOME_ROWS = re.compile(r"(.*)\[(\d+):\d+\]")


class ArraySource(Protocol):
    """An array of the state that training changes, such as a variable of a model.

    For the type of its elements, see TYPE_NAMES. The shape () has one row.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def dtype(self) -> Any: ...  # noqa: D102

    def copy_into(self, rows: slice, out: NDArray[Any]) -> None:
        """Copies the present values of some rows; called on the thread that saves.

        The slice has start and stop; it is slice(0, 1) if the shape is (). What is copied into has
        the same type and the shape of these rows.
        """


@dataclass(frozen=True)
class ArraySpec:
    """The type and the shape of an array."""

    dtype: str  # the name of the type of its elements in NumPy, one of TYPE_NAMES
    shape: tuple[int, ...]  # () has one row

    @classmethod
    def of(cls, name: str, array: Any) -> ArraySpec:
        """Returns that of anything that has a `dtype` and a `shape`.

        Raises CheckpointError if a checkpoint cannot hold elements of this type.
        """
        dtype = str(np.dtype(array.dtype))
        if dtype not in TYPE_NAMES:
            raise CheckpointError(
                f"the array {name!r} cannot be saved in a checkpoint: its elements are {dtype},"
                f" not one of {', '.join(TYPE_NAMES)}"
            )
        return cls(dtype, tuple(int(size) for size in array.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def numpy_type(self) -> np.dtype[Any]:
        """The type of its elements; bfloat16 is that of ml_dtypes."""
        if self.dtype == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(self.dtype)

    @property
    def num_rows(self) -> int:
        """The number of rows, along the first axis."""
        return self.shape[0] if self.shape else 1

    @property
    def num_bytes(self) -> int:
        """The size of the array."""
        return math.prod(self.shape) * self.numpy_type.itemsize

    def rows(self, start: int, stop: int) -> ArraySpec:
        """Returns the description of some of its rows."""
        return ArraySpec(self.dtype, (stop - start, *self.shape[1:])) if self.shape else self


class Rows(NamedTuple):
    """Rows of an array: from `start` up to, but without, `stop`."""

    array: str
    start: int
    stop: int

    def key(self, spec: ArraySpec) -> str:
        """Returns their name in a shard's file: that of the array, with the rows if not all."""
        is_whole = self.stop - self.start == spec.num_rows
        return self.array if is_whole else f"{self.array}[{self.start}:{self.stop}]"


def split_key(key: str) -> tuple[str, int]:
    """Returns the array and the first row of rows with this name in a shard's file."""
    match = SOME_ROWS.fullmatch(key)
    return (match[1], int(match[2])) if match else (key, 0)


def divide(specs: Mapping[str, ArraySpec], num_shards: int) -> list[list[Rows]]:
    """Divides arrays into shards of about the same number of bytes.

    The arrays are laid end to end and cut at equal distances; every cut is moved to the nearest
    row, or, in an array smaller than SMALL_BYTES, to its nearer end. So an array of a few huge rows
    makes the shards unequal, and some may be empty.

    Returns:
        The rows of every shard; together, they are all rows of all arrays, each once. Arrays
        without elements are in the first shard.
    """
    total = sum(spec.num_bytes for spec in specs.values())
    shards: list[list[Rows]] = [[] for _ in range(num_shards)]
    begin = 0
    for name, spec in specs.items():
        num_bytes, num_rows = spec.num_bytes, spec.num_rows
        if not num_bytes:
            shards[0].append(Rows(name, 0, num_rows))
            continue
        num_pieces = num_rows if num_bytes >= SMALL_BYTES else 1
        cuts = [
            round(min(max(i * total // num_shards - begin, 0), num_bytes) * num_pieces / num_bytes)
            for i in range(num_shards + 1)
        ]
        for shard, (start, stop) in zip(shards, pairwise(cuts), strict=True):
            if start < stop:
                rows = num_rows // num_pieces
                shard.append(Rows(name, start * rows, stop * rows))
        begin += num_bytes
    return shards


class ShardLayout:
    """The content of a safetensors file, before the values of the arrays are known.

    Raises CheckpointError if an array has a name that the format needs itself.
    """

    def __init__(self, specs: Mapping[str, ArraySpec], shard: Sequence[Rows]) -> None:
        held = [(rows, specs[rows.array].rows(rows.start, rows.stop)) for rows in shard]
        held.sort(key=lambda each: -each[1].numpy_type.itemsize)  # so that all are aligned
        content: dict[str, Any] = {"__metadata__": {"format": "np"}}
        end = 0
        for rows, spec in held:
            key = rows.key(specs[rows.array])
            if key in content or SOME_ROWS.fullmatch(rows.array):
                raise CheckpointError(f"an array of a checkpoint cannot be named {key!r}")
            begin, end = end, end + spec.num_bytes
            content[key] = {
                "dtype": TYPE_NAMES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": (begin, end),
            }
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)  # so that the arrays are aligned
        self._header = len(text).to_bytes(8, "little") + text
        self._held = held
        self.num_bytes = len(self._header) + end

    def fill(self, memory: NDArray[np.uint8]) -> Iterator[tuple[Rows, NDArray[Any]]]:
        """Writes the header into memory of at least `num_bytes`; yields the place of all rows."""
        begin = len(self._header)
        memory[:begin] = np.frombuffer(self._header, np.uint8)
        for rows, spec in self._held:
            end = begin + spec.num_bytes
            yield rows, memory[begin:end].view(spec.numpy_type).reshape(spec.shape)
            begin = end


LARGE_BYTES = 1 << 30
"""A state of more bytes is written by the ranks of all nodes."""
APPEAR_S = 3.0
"""How long a network file system may take to show on one node what another has created."""


@dataclass(frozen=True)
class ShardPlan:
    """Who writes what of a state: the first of the ranks, which is rank 0, shard 0, and so on."""

    specs: Mapping[str, ArraySpec]
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all arrays."""
        return sum(spec.num_bytes for spec in self.specs.values())

    @cached_property
    def shards(self) -> list[list[Rows]]:
        """The rows of every shard."""
        return divide(self.specs, len(self.ranks))

    def layout_of(self, rank: int) -> ShardLayout | None:
        """Returns the content of the file that a rank writes; None if it writes none."""
        if rank not in self.ranks:
            return None
        return ShardLayout(self.specs, self.shards[self.ranks.index(rank)])


class ShardPlanner:
    """Divides the work among ranks. Creating one is collective.

    The sign is a file that rank 0 has created in the directory of the checkpoints; nodes that see
    it and may write there can take part. None: the directory cannot be written now, so that nobody
    knows.
    """

    def __init__(self, comm: Communicator, sign: Path | None) -> None:
        self._of_node = [rank for rank, _ in comm.collect(comm.node == 0 or None)]
        self._of_all = self._of_node
        if comm.num_nodes > 1:
            sees = comm.local.broadcast(comm.local_rank == 0 and _sees(comm, sign))
            blind = {rank for rank, _ in comm.collect(None if sees else True)}  # few, if any
            self._of_all = [rank for rank in range(comm.size) if rank not in blind]

    def plan(self, specs: Mapping[str, ArraySpec]) -> ShardPlan:
        """Returns who writes what; the same on all ranks."""
        num_bytes = ShardPlan(specs, ()).num_bytes
        ranks = self._of_all if num_bytes > LARGE_BYTES else self._of_node
        num_shards = max(1, min(len(ranks), num_bytes // SMALL_BYTES))
        spread = tuple(ranks[shard * len(ranks) // num_shards] for shard in range(num_shards))
        return ShardPlan(specs, spread)


def _sees(comm: Communicator, sign: Path | None) -> bool:
    if comm.node == 0 or sign is None:
        return comm.node == 0
    deadline = time.monotonic() + APPEAR_S
    while not (is_there := sign.exists()) and time.monotonic() <= deadline:
        time.sleep(0.1)
    return is_there and os.access(sign.parent, os.W_OK)


CHUNK_BYTES = 16 << 20
PAGE_BYTES = 4096


class WritingStoppedError(Exception):
    """Writing was given up."""


class CopyMemory:
    """Page-aligned memory, in whole pages, as writing past the page cache requires.

    `num_bytes` are used; `bytes`, and `buffer` for the operating system, have whole pages. Raises
    OSError if there is not enough address space.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        size = max(-(-num_bytes // PAGE_BYTES), 1) * PAGE_BYTES
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # the kernel may have no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(mapping)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)

    def touch(self) -> None:
        """Has the kernel provide the memory, which takes longer than the copying."""
        self.bytes[::PAGE_BYTES] = 0


def write_synced(path: Path, memory: CopyMemory, stop: threading.Event | None = None) -> FileEntry:
    """Writes a new file and waits until it is on the disk.

    The page cache is avoided where the file system allows it: the content is then not copied once
    more, which saves memory and processor time that training needs. `stop` is set if writing is to
    be given up. Returns the file's size and digest, computed from the memory.

    Raises:
        OSError: It cannot be written; what was written is removed.
        WritingStoppedError: `stop` was set; likewise.
    """
    digest, content = xxhash.xxh3_128(), memory.buffer
    try:
        with _created(path) as file:
            for begin in range(0, memory.num_bytes, CHUNK_BYTES):
                if stop is not None and stop.is_set():
                    raise WritingStoppedError
                end = min(begin + CHUNK_BYTES, memory.num_bytes)
                digest.update(content[begin:end])
                _write(file, content[begin : -(-end // PAGE_BYTES) * PAGE_BYTES])
            os.ftruncate(file, memory.num_bytes)
            os.fsync(file)
    except FileExistsError:
        raise
    except BaseException as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # errors of a descriptor do not name the file
        raise
    return FileEntry(bytes=memory.num_bytes, xxh3_128=digest.hexdigest())


def file_entry(path: Path, *, uncached: bool = False) -> FileEntry:
    """Returns the size and the digest of a file, or raises OSError.

    With `uncached`, it is read from the disk and not from memory; it must be synced.
    """
    digest, size, chunk = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        if uncached:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while num_read := file.readinto(chunk):
            digest.update(chunk[:num_read])
            size += num_read
    return FileEntry(bytes=size, xxh3_128=digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk, or raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync directories
            raise
    finally:
        os.close(file)


@contextmanager
def _created(path: Path) -> Iterator[int]:
    """Opens a new file past the page cache, or through it where the file system requires that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        with suppress(OSError):  # some kernels create the file before they refuse O_DIRECT
            path.unlink(missing_ok=True)
        file = os.open(path, flags, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, content: memoryview) -> None:
    """Writes whole pages at the end of a file; through the page cache where that is required."""
    while content:
        try:
            num_written = os.write(file, content)
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if num_written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        content = content[num_written:]
