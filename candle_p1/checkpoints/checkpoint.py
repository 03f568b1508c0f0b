"""Reading and verifying checkpoints: one, and those of a directory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.checkpoints.lock import clean, remove_tree, temporary_name
from candle_p1.checkpoints.manifest import (
    MANIFEST,
    NAME,
    RANK_PREFIX,
    RANKS_FILE,
    CheckpointManifest,
    EarlierEntry,
    OtherVersionError,
    name_order,
)
from candle_p1.checkpoints.shards import NUMPY_NAMES, ArraySpec, file_entry, split_key
from candle_p1.errors import CheckpointError


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

        Raises CheckpointError if a file is missing or damaged.
        """
        found = {}
        for name, shards in self._shards.items():
            *_, spec = shards[0]
            if len(shards) > 1:
                num_rows = sum(each.num_rows for *_, each in shards)
                spec = ArraySpec(spec.dtype, (num_rows, *spec.shape[1:]))
            found[name] = spec
        return found

    def read(self, name: str) -> NDArray[Any]:
        """Returns an array of the shared state, one of `arrays`, whose values only `verify` checks.

        Raises CheckpointError if a file is missing or damaged.
        """
        values = []
        for _, shard, key, _ in self._shards[name]:
            with self._opened(shard) as file:
                values.append(file.get_tensor(key))
        return values[0] if len(values) == 1 else np.concatenate(values)

    def rank_states(self) -> list[dict[str, NDArray[Any]]]:
        """Returns what every rank has handed to `CheckpointWriter.save` as its own, by name.

        Raises CheckpointError if the file is missing or damaged.
        """
        states: list[dict[str, NDArray[Any]]] = [{} for _ in range(self.num_ranks)]
        with self._opened(RANKS_FILE) as file:
            for key in file.keys():  # noqa: SIM118
                rank, _, name = key.removeprefix(RANK_PREFIX).partition("/")
                states[int(rank)][name] = file.get_tensor(key)
        return states

    def verify(self) -> None:
        """Reads all files; CheckpointError, which names the file, if one is not as it was."""
        with ThreadPoolExecutor(4) as pool:
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
    def _shards(self) -> dict[str, list[tuple[int, str, str, ArraySpec]]]:
        """Where the rows of every array are, in order, as the files' headers say.

        They are the first row, the file, the rows' name there, and their type and shape.
        """
        found: dict[str, list[tuple[int, str, str, ArraySpec]]] = defaultdict(list)
        for name in self.manifest.files:
            if name == RANKS_FILE:
                continue
            with self._opened(name) as file:
                for key in file.keys():  # noqa: SIM118
                    held = file.get_slice(key)
                    array, start = split_key(key)
                    spec = ArraySpec(NUMPY_NAMES[held.get_dtype()], tuple(held.get_shape()))
                    found[array].append((start, name, key, spec))
        return {array: sorted(shards, key=itemgetter(0)) for array, shards in found.items()}

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


LATEST, BEST = "latest", "best"


class CheckpointRoot:
    """A directory of checkpoints, which need not exist. One rank uses it; nothing is collective."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def names(self) -> list[str]:
        """Returns the names of the checkpoints, by position; some may be damaged."""
        try:
            with os.scandir(self.directory) as entries:
                found = [e.name for e in entries if NAME.fullmatch(e.name) and e.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error.strerror}") from error
        return sorted(found, key=name_order)

    def candidates(self) -> list[Path]:
        """Returns the directories of the checkpoints to resume from, in this order.

        The first is the latest. If it says which others the run had, these follow, the newest
        first, so that what a user has gone back from is not taken; else all others.
        """
        link = self.directory / LATEST
        latest = link.resolve() if link.is_dir() else None
        manifest = _manifest(latest) if latest else None
        if latest and manifest:
            others = [latest.parent / each.name for each in manifest.earlier]
            return [latest, *filter(Path.is_dir, others)]
        found = [self.directory.resolve() / name for name in self.names()]
        made = {path: each.created if (each := _manifest(path)) else "" for path in found}
        others = sorted(
            (path for path in found if path != latest), key=made.__getitem__, reverse=True
        )
        return [latest, *others] if latest else others

    def newest(self) -> Checkpoint | None:
        """Returns the first of the candidates whose manifest is good; None if there is none.

        Raises OtherVersionError if one that comes before has another version of the format.
        """
        return self._first(lambda problem: None, Checkpoint)

    def newest_good(self, report: Callable[[str], None]) -> Checkpoint | None:
        """Returns the first of the candidates that is good, verified; None if there is none.

        What writers that were killed have left is first removed or completed. The report receives
        a sentence on every checkpoint that is damaged. Raises OtherVersionError as `newest`.
        """
        clean(self.directory, report)
        link = self.directory / LATEST
        if link.is_symlink() and not link.exists():
            report(f"{link} names {link.readlink()}, which is missing")

        def verified(directory: Path) -> Checkpoint:
            checkpoint = Checkpoint(directory)
            checkpoint.verify()
            return checkpoint

        return self._first(report, verified)

    def _first(
        self, report: Callable[[str], None], read: Callable[[Path], Checkpoint]
    ) -> Checkpoint | None:
        for path in self.candidates():
            try:
                return read(path)
            except OtherVersionError:
                raise
            except CheckpointError as error:
                report(str(error))
        return None


class OwnCheckpoints:
    """Those of a directory that one run has saved, with the runs that it continues; for rank 0.

    Args:
        directory: The directory.
        token: That of the writer.
        keep: Chooses, by their numbers within the run, those that are kept. The newest and the best
            are kept in any case.
        after: The checkpoint that the run resumes from, if any.

    Attributes:
        last_number: The number of the last one that was saved.
    """

    def __init__(
        self,
        directory: Path,
        token: str,
        keep: Callable[[Collection[int]], set[int]],
        after: Checkpoint | None,
    ) -> None:
        self._directory, self._token, self._keep = directory, token, keep
        self._numbers: dict[str, int] = {}  # the oldest first
        self._best: str | None = None
        self._removals = count(1)
        self.last_number = 0 if after is None else after.manifest.number
        if after is None or after.directory.parent != directory.resolve():
            return
        for each in reversed(after.manifest.earlier):
            path = directory / each.name
            try:
                manifest = CheckpointManifest.read(path)
                is_own, is_best = manifest.created < after.manifest.created, manifest.best
            except OtherVersionError:
                is_own = is_best = False
            except CheckpointError:  # one that is damaged must not stay for ever
                is_own, is_best = os.path.lexists(path), False
            if is_own:  # else, it is missing, or another run's by now
                self._add(each.name, each.number, is_best)
        self._add(after.directory.name, self.last_number, after.manifest.best)

    @property
    def newest(self) -> str | None:
        """The name of the newest one."""
        return next(reversed(self._numbers), None)

    def entries(self) -> list[EarlierEntry]:
        """Returns those that are there, the newest first."""
        there = set(CheckpointRoot(self._directory).names())
        self._numbers = {name: num for name, num in self._numbers.items() if name in there}
        return [
            EarlierEntry(name=name, number=num) for name, num in reversed(self._numbers.items())
        ]

    def add(self, name: str, *, best: bool) -> None:
        """Adds one that has been saved, and whether it was the best so far."""
        self.last_number += 1
        self._add(name, self.last_number, best)

    def remove_others(self) -> None:
        """Removes those that are not kept, or raises OSError.

        One that is half removed has no name of a checkpoint.
        """
        kept = self._keep(self._numbers.values())
        for name, number in list(self._numbers.items()):
            if number in kept or name in (self.newest, self._best):
                continue
            aside = self._directory / temporary_name(name, self._token, next(self._removals))
            with suppress(FileNotFoundError):
                (self._directory / name).rename(aside)
                remove_tree(aside)
            del self._numbers[name]  # another run may take the name

    def _add(self, name: str, number: int, best: bool) -> None:
        self._numbers[name] = number
        if best:
            self._best = name


def _manifest(directory: Path) -> CheckpointManifest | None:
    """Returns the manifest of a checkpoint; None if it is missing or damaged."""
    with suppress(CheckpointError):
        return CheckpointManifest.read(directory)
    return None
