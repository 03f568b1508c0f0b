"""Which rank writes which rows of which array, and how these lie in a file.

The file is a safetensors file (https://github.com/huggingface/safetensors#format): the length of
the header, 8 bytes little-endian; the header, JSON, with the type, the shape and the place of every
array; then the arrays' bytes without gaps. The library's own writer would need all arrays in memory
a second time, so the header is made here, and each array is copied once, to its place in the file.
"""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from candle_p1.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from candle_p1.checkpoints.memory import CopyMemory

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


def numpy_type(name: str) -> np.dtype[Any]:
    """Returns a type of elements by its name in NumPy; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class ArraySpec:
    """The type and the shape of an array.

    Attributes:
        dtype: The name of the type of its elements in NumPy, one of TYPE_NAMES.
        shape: Its shape; () has one row.
    """

    dtype: str
    shape: tuple[int, ...]

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

    @property
    def num_rows(self) -> int:
        """The number of rows, along the first axis."""
        return self.shape[0] if self.shape else 1

    @property
    def num_bytes(self) -> int:
        """The size of the array."""
        return math.prod(self.shape) * numpy_type(self.dtype).itemsize

    def rows(self, start: int, stop: int) -> ArraySpec:
        """Returns the description of some of its rows."""
        return ArraySpec(self.dtype, (stop - start, *self.shape[1:])) if self.shape else self


class Piece(NamedTuple):
    """Rows of an array: from `start` up to, but without, `stop`."""

    array: str
    start: int
    stop: int


def share_arrays(specs: Mapping[str, ArraySpec], num_parts: int) -> list[list[Piece]]:
    """Divides arrays into parts of about the same number of bytes.

    The arrays are laid end to end and cut at equal distances; every cut is moved to the nearest
    row, or, in an array smaller than SMALL_BYTES, to its nearer end. So an array of a few huge rows
    makes the parts unequal, and some may be empty.

    Returns:
        The pieces of every part; together, they are all rows of all arrays, each once. Arrays
        without elements are in the first part.
    """
    names = [name for name, spec in specs.items() if spec.num_bytes]
    ends = list(accumulate((specs[name].num_bytes for name in names), initial=0))
    cuts = [(0, 0)]  # (array, row), where the parts begin
    for part in range(1, num_parts):
        target = part * ends[-1] // num_parts
        i = min(bisect.bisect_right(ends, target) - 1, len(names))
        if i == len(names):
            cuts.append((i, 0))
            continue
        spec = specs[names[i]]
        num_rows = spec.num_rows if spec.num_bytes >= SMALL_BYTES else 1
        row = round((target - ends[i]) * num_rows / spec.num_bytes)
        cuts.append((i + 1, 0) if row == num_rows else (i, row))
    cuts.append((len(names), 0))
    parts = [_pieces_between(names, specs, first, last) for first, last in pairwise(cuts)]
    empty = [Piece(name, 0, spec.num_rows) for name, spec in specs.items() if not spec.num_bytes]
    return [parts[0] + empty, *parts[1:]]


def _pieces_between(
    names: Sequence[str],
    specs: Mapping[str, ArraySpec],
    first: tuple[int, int],
    last: tuple[int, int],
) -> list[Piece]:
    pieces = []
    for i in range(first[0], min(last[0] + 1, len(names))):
        start = first[1] if i == first[0] else 0
        stop = last[1] if i == last[0] else specs[names[i]].num_rows
        if start < stop:
            pieces.append(Piece(names[i], start, stop))
    return pieces


class Placed(NamedTuple):
    """A piece within a file.

    Attributes:
        key: Its name in the file.
        piece: The rows.
        spec: Their type and shape.
        first_byte: Where they begin in the file.
    """

    key: str
    piece: Piece
    spec: ArraySpec
    first_byte: int


class PartLayout:
    """The content of a safetensors file, before the values of the arrays are known.

    Args:
        specs: The type and the shape of every array.
        pieces: The rows that the file holds.

    Attributes:
        header: The first bytes of the file.
        placed: The pieces in the order in which they lie in the file, aligned to their elements.
        num_bytes: The size of the file.
    """

    def __init__(self, specs: Mapping[str, ArraySpec], pieces: Sequence[Piece]) -> None:
        shapes = [specs[piece.array].rows(piece.start, piece.stop) for piece in pieces]
        # Widest elements first, so that all are aligned; among these the smallest pieces first, so
        # that writing can begin early.
        widest_first = sorted(
            zip(pieces, shapes, strict=True),
            key=lambda each: (-numpy_type(each[1].dtype).itemsize, each[1].num_bytes),
        )
        content: dict[str, Any] = {"__metadata__": {"format": "np"}}
        end = 0
        ends = []
        for piece, spec in widest_first:
            key = piece_key(piece, specs[piece.array])
            if key in content:
                raise CheckpointError(f"an array of a checkpoint cannot be named {key!r}")
            begin, end = end, end + spec.num_bytes
            ends.append((key, begin))
            content[key] = {
                "dtype": TYPE_NAMES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": (begin, end),
            }
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
        self.header = len(text).to_bytes(8, "little") + text
        self.placed = [
            Placed(key, piece, spec, len(self.header) + begin)
            for (piece, spec), (key, begin) in zip(widest_first, ends, strict=True)
        ]
        self.num_bytes = len(self.header) + end

    def fill(self, memory: CopyMemory) -> Iterator[tuple[Piece, NDArray[Any]]]:
        """Writes the header into memory of `num_bytes`, and yields where each piece belongs.

        What the caller has copied there counts as filled when it asks for the next.
        """
        memory.bytes[: len(self.header)] = np.frombuffer(self.header, np.uint8)
        for placed in self.placed:
            memory.filled(placed.first_byte)
            spec = placed.spec
            values = memory.view(placed.first_byte, spec.num_bytes, numpy_type(spec.dtype))
            yield placed.piece, values.reshape(spec.shape)
        memory.filled(self.num_bytes)


def piece_key(piece: Piece, spec: ArraySpec) -> str:
    """Returns the name of a piece in its file: that of the array, with the rows if not all."""
    if piece.stop - piece.start == spec.num_rows:
        return piece.array
    return f"{piece.array}[{piece.start}:{piece.stop}]"
