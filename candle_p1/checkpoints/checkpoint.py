"""Reading and verifying a checkpoint."""

from __future__ import annotations

import json
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.checkpoints.layout import TYPE_NAMES, ArraySpec, numpy_type
from candle_p1.checkpoints.manifest import (
    MANIFEST,
    RANKS_FILE,
    CheckpointManifest,
    PieceEntry,
    Position,
)
from candle_p1.checkpoints.part_file import file_entry
from candle_p1.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

NUM_THREADS = 4


class Checkpoint:
    """A checkpoint on disk. One rank reads it; nothing here is collective.

    Args:
        directory: Its directory, or a link to it.

    Attributes:
        directory: Its directory, without links.
        manifest: Its manifest.
        position: How far training had come.
        facts: What was handed to `CheckpointWriter.save` as facts.
        arrays: The type and the shape of every array of the shared state, by name.
        num_ranks: The number of ranks that trained.

    Raises:
        CheckpointError: Its manifest is missing, damaged, or of a version that is not known.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.manifest = CheckpointManifest.read(self.directory)
        self.position = Position(self.manifest.position.epoch, self.manifest.position.step)
        self.facts: dict[str, Any] = self.manifest.facts
        self.arrays: Mapping[str, ArraySpec] = {
            name: entry.spec for name, entry in self.manifest.arrays.items()
        }
        self.num_ranks = self.manifest.num_ranks
        self._files: dict[str, _PartFile] = {}

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.directory)!r})"

    @property
    def num_bytes(self) -> int:
        """The size of its files, without the manifest."""
        return sum(entry.bytes for entry in self.manifest.files.values())

    def read(self, name: str, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Returns an array of the shared state.

        Args:
            name: One of `arrays`.
            out: Where its values go, of the same type and shape; None: a new array, or one that is
                mapped from the file, read-only, if the array is in one piece.

        Raises:
            CheckpointError: A file is missing or has the wrong size. Whether the values are those
                that were written is what `verify` tells.
        """
        entry = self.manifest.arrays[name]
        pieces = [self._piece(name, piece) for piece in entry.pieces]
        if out is None and len(pieces) == 1 and pieces[0].shape == entry.shape:
            return pieces[0]
        if out is None:
            out = np.empty(entry.shape, numpy_type(entry.dtype))
        for piece, values in zip(entry.pieces, pieces, strict=True):
            np.copyto(out[slice(*piece.rows)] if entry.shape else out, values, casting="no")
        return out

    def rank_state(self, rank: int) -> dict[str, NDArray[Any]]:
        """Returns the arrays that one rank has handed to `CheckpointWriter.save` as its own.

        Returns:
            The arrays, by name; {} for a rank that had none.

        Raises:
            CheckpointError: The file is missing or has the wrong size.
        """
        prefix, file = rank_prefix(rank), self._file(RANKS_FILE)
        return {
            key.removeprefix(prefix): np.array(file.read(key))
            for key in file.content
            if key.startswith(prefix)
        }

    def release(self) -> None:
        """Lets go of the mapped files; reading maps them again.

        Until then, they hold memory, and disk space even if the checkpoint is removed. Arrays that
        `read` has mapped stay valid and hold their own file.
        """
        self._files.clear()

    def verify(self) -> None:
        """Reads all files and makes sure that they are those that were written.

        Raises:
            CheckpointError: A file is missing, truncated or changed; the message names it.
        """
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(self._verify, self.manifest.files))
        for name, entry in self.manifest.arrays.items():
            for piece in entry.pieces:
                self._piece(name, piece)
            rows = sorted(piece.rows for piece in entry.pieces)
            ends = [0, *(stop for _, stop in rows)]
            if [start for start, _ in rows] != ends[:-1] or ends[-1] != entry.spec.num_rows:
                raise CheckpointError(
                    f"{self.directory / MANIFEST} is damaged: the array {name!r} lacks rows"
                )

    def _verify(self, name: str) -> None:
        from safetensors import SafetensorError, safe_open

        path, entry = self.directory / name, self.manifest.files[name]
        self._check_size(name)
        try:
            found = file_entry(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if found != entry:
            raise CheckpointError(
                f"{path} is damaged: its content does not have the digest in {MANIFEST}"
            )
        try:
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def _check_size(self, name: str) -> None:
        path, expected = self.directory / name, self.manifest.files[name].bytes
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} is missing: {error.strerror}") from error
        if size != expected:
            raise CheckpointError(f"{path} is damaged: it has {size:,} bytes, not {expected:,}")

    def _file(self, name: str) -> _PartFile:
        if name not in self._files:
            if name not in self.manifest.files:
                raise CheckpointError(
                    f"{self.directory / MANIFEST} is damaged: it does not list {name}"
                )
            self._check_size(name)
            self._files[name] = _PartFile(self.directory / name)
        return self._files[name]

    def _piece(self, name: str, piece: PieceEntry) -> NDArray[Any]:
        values = self._file(piece.file).read(piece.key)
        if ArraySpec.of(name, values) != self.arrays[name].rows(*piece.rows):
            raise CheckpointError(
                f"{self.directory / piece.file} is damaged: {piece.key!r} is not what {MANIFEST}"
                f" says about {name!r}"
            )
        return values


def rank_prefix(rank: int) -> str:
    """Returns what the names of one rank's own arrays begin with."""
    return f"rank-{rank:05d}/"


class _PartFile:
    """A safetensors file, mapped into memory.

    Attributes:
        content: What its header says about each array.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self._bytes = np.frombuffer(mapping, np.uint8)
            size = int.from_bytes(mapping[:8], "little")
            self.content: dict[str, Any] = json.loads(mapping[8 : 8 + size])
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError):
            raise CheckpointError(f"{path} is damaged: it has no header") from None
        self._begin = 8 + size
        self.content.pop("__metadata__", None)

    def read(self, key: str) -> NDArray[Any]:
        """Returns an array, mapped, read-only."""
        try:
            entry = self.content[key]
            begin, end = (self._begin + offset for offset in entry["data_offsets"])
            values = self._bytes[begin:end].view(_numpy_types()[entry["dtype"]])
            return values.reshape(entry["shape"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{self._path} is damaged: it does not hold {key!r} as its header says"
            ) from None


def _numpy_types() -> dict[str, np.dtype[Any]]:
    return {there: numpy_type(here) for here, there in TYPE_NAMES.items()}
