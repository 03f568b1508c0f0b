"""The checkpoints of a directory: which is the latest, which are good, which are kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import count
from pathlib import Path

from candle_p1.checkpoints.checkpoint import Checkpoint
from candle_p1.checkpoints.manifest import (
    NAME,
    CheckpointManifest,
    EarlierEntry,
    OtherVersionError,
    name_order,
)
from candle_p1.checkpoints.stale_files import clean, remove_tree, temporary_name
from candle_p1.errors import CheckpointError

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
        others = sorted((path for path in found if path != latest), key=_created, reverse=True)
        return [latest, *others] if latest else others

    def newest(self) -> Checkpoint | None:
        """Returns the first of the candidates whose manifest is good; None if there is none.

        Raises:
            OtherVersionError: One that comes before has another version of the format.
        """
        return self._first(lambda problem: None, Checkpoint)

    def newest_good(self, report: Callable[[str], None]) -> Checkpoint | None:
        """Returns the first of the candidates that is good, verified; None if there is none.

        What writers that were killed have left is first removed or completed. The report receives
        a sentence on every checkpoint that is damaged.

        Raises:
            OtherVersionError: One that comes before has another version of the format.
        """
        clean(self.directory, report)
        link = self.directory / LATEST
        if link.is_symlink() and not link.exists():
            report(f"{link} names {link.readlink()}, which is missing")
        return self._first(report, _verified)

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
        """Removes those that are not kept; one that is half removed has no name of a checkpoint.

        Raises:
            OSError: One cannot be removed.
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


def _verified(directory: Path) -> Checkpoint:
    checkpoint = Checkpoint(directory)
    checkpoint.verify()
    return checkpoint


def _manifest(directory: Path) -> CheckpointManifest | None:
    """Returns the manifest of a checkpoint; None if it is missing or damaged."""
    try:
        return CheckpointManifest.read(directory)
    except CheckpointError:
        return None


def _created(directory: Path) -> str:
    """Returns when a checkpoint was made, in a form that can be compared; "" if damaged."""
    manifest = _manifest(directory)
    return manifest.created if manifest else ""
