"""Reading and verifying a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.checkpoints.arrays import NUMPY_NAMES, ArraySpec, split_key
from candle_p1.checkpoints.manifest import MANIFEST, RANK_PREFIX, RANKS_FILE, CheckpointManifest
from candle_p1.checkpoints.shard_file import file_entry
from candle_p1.errors import CheckpointError

NUM_THREADS = 4


class _Shard(NamedTuple):
    """Rows of an array: the first of them, the file, their name there, their type and shape."""

    start: int
    file: str
    key: str
    spec: ArraySpec


class Checkpoint:
    """A checkpoint on disk. One rank reads it; nothing here is collective.

    It is named by its directory, or a link to it; `directory` is without links.

    Raises:
        OtherVersionError: It has another version of the format.
        CheckpointError: Its manifest is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.manifest = CheckpointManifest.read(self.directory)
        self.position = self.manifest.position
        self.facts: dict[str, Any] = self.manifest.facts
        self.num_ranks = self.manifest.num_ranks

    @cached_property
    def arrays(self) -> Mapping[str, ArraySpec]:
        """The type and the shape of every array of the shared state, by name.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        found = {}
        for name, shards in self._shards.items():
            spec = shards[0].spec
            if len(shards) > 1:
                num_rows = sum(shard.spec.num_rows for shard in shards)
                spec = ArraySpec(spec.dtype, (num_rows, *spec.shape[1:]))
            found[name] = spec
        return found

    def read(self, name: str) -> NDArray[Any]:
        """Returns an array of the shared state, one of `arrays`.

        Raises:
            CheckpointError: A file is missing or damaged. Whether the values are those that were
                written is what `verify` tells.
        """
        values = []
        for shard in self._shards[name]:
            with self._opened(shard.file) as file:
                values.append(file.get_tensor(shard.key))
        return values[0] if len(values) == 1 else np.concatenate(values)

    def rank_states(self) -> list[dict[str, NDArray[Any]]]:
        """Returns what every rank has handed to `CheckpointWriter.save` as its own, by name.

        Raises:
            CheckpointError: The file is missing or damaged.
        """
        states: list[dict[str, NDArray[Any]]] = [{} for _ in range(self.num_ranks)]
        with self._opened(RANKS_FILE) as file:
            for key in file.keys():  # noqa: SIM118
                rank, _, name = key.removeprefix(RANK_PREFIX).partition("/")
                states[int(rank)][name] = file.get_tensor(key)
        return states

    def verify(self) -> None:
        """Reads all files and makes sure that they are those that were written.

        Raises:
            CheckpointError: A file is missing, truncated or changed; the message names it.
        """
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(self._verify, self.manifest.files))

    def _verify(self, name: str) -> None:
        path = self.directory / name
        try:
            found = file_entry(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if found != self.manifest.files[name]:
            raise CheckpointError(
                f"{path} is damaged: its content does not have the digest in {MANIFEST}"
            )

    @cached_property
    def _shards(self) -> dict[str, list[_Shard]]:
        """Where the rows of every array are, in order, as the files' headers say."""
        found: dict[str, list[_Shard]] = defaultdict(list)
        for name in self.manifest.files:
            if name == RANKS_FILE:
                continue
            with self._opened(name) as file:
                for key in file.keys():  # noqa: SIM118
                    held = file.get_slice(key)
                    array, start = split_key(key)
                    spec = ArraySpec(NUMPY_NAMES[held.get_dtype()], tuple(held.get_shape()))
                    found[array].append(_Shard(start, name, key, spec))
        return {
            array: sorted(shards, key=lambda each: each.start) for array, shards in found.items()
        }

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        path = self.directory / name
        try:
            with safe_open(path, framework="np") as file:
                yield file
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
