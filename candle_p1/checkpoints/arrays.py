"""The arrays of a checkpoint: what they are, which shard holds which rows, how a shard's file lies.

The file is a safetensors file (https://github.com/huggingface/safetensors#format): the length of
the header, 8 bytes little-endian; the header, JSON, with the type, the shape and the place of every
array; then the arrays' bytes without gaps. The library's own writer would need all arrays in memory
a second time, so the header is made here, and each array is copied once, to its place in the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from candle_p1.errors import CheckpointError

SMALL_BYTES = 1 << 20
"""Arrays below this size are not split, and no rank writes less, so that files do not get tiny."""
HEADER_ALIGNMENT = 64

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
        """Returns the description of anything that has a `dtype` and a `shape`.

        Raises:
            CheckpointError: A checkpoint cannot hold elements of this type.
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

    Raises:
        CheckpointError: An array has a name that the format needs itself.
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
        text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
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
