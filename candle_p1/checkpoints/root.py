"""The checkpoints of a directory: which is the latest, which are good, which are kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from candle_p1.checkpoints.checkpoint import Checkpoint
from candle_p1.checkpoints.leftovers import remove_tree, settle, temporary_name
from candle_p1.checkpoints.manifest import NAME, CheckpointManifest
from candle_p1.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LATEST, BEST = "latest", "best"


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that a run has, as the function that chooses which to keep sees it.

    Attributes:
        name: The name of its directory.
        number: Its number within the run, from 1, in the order of saving.
        latest: Whether it is the latest, which is kept in any case.
        best: Whether it is the best, which is kept in any case.
    """

    name: str
    number: int
    latest: bool = False
    best: bool = False


class CheckpointRoot:
    """A directory of checkpoints. One rank uses it; nothing here is collective.

    Args:
        directory: The directory; it need not exist.
    """

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

    def linked(self, link: str) -> str | None:
        """Returns the name of the checkpoint that "latest" or "best" names, if it is here."""
        target = self.directory / link
        if not target.is_symlink() or not target.is_dir():
            return None
        found = target.resolve()
        return found.name if found.parent == self.directory.resolve() else None

    def latest(self) -> Checkpoint | None:
        """Returns what the link "latest" names, not verified; None if there is none.

        Raises:
            CheckpointError: Its manifest is damaged.
        """
        link = self.directory / LATEST
        return Checkpoint(link) if link.is_dir() else None

    def candidates(self) -> list[Path]:
        """Returns the directories of the checkpoints to go on from, in this order.

        The first is the latest. If it says which others the run had, these follow, the newest
        first, so that what a user has gone back from is not taken; else all others.
        """
        link = self.directory / LATEST
        latest = link.resolve() if link.is_dir() else None
        if latest is not None:
            try:
                before = CheckpointManifest.read(latest).before
            except CheckpointError:
                pass
            else:
                names = [each.name for each in before if NAME.fullmatch(each.name)]
                others = [latest.parent / name for name in names]
                return [latest, *(path for path in others if path.is_dir())]
        found = [self.directory.resolve() / name for name in self.names()]
        others = sorted((path for path in found if path != latest), key=_created, reverse=True)
        return others if latest is None else [latest, *others]

    def newest_good(self, report: Callable[[str], None]) -> Checkpoint | None:
        """Returns the first of the candidates that is good, verified; None if there is none.

        What writers that were killed have left is first removed or completed.

        Args:
            report: Receives a sentence on every checkpoint that is damaged.
        """
        settle(self.directory, report)
        link = self.directory / LATEST
        if link.is_symlink() and not link.exists():
            report(f"{link} names {link.readlink()}, which is missing")
        for path in self.candidates():
            try:
                checkpoint = Checkpoint(path)
                checkpoint.verify()
            except CheckpointError as error:
                report(str(error))
            else:
                return checkpoint
        return None

    def remove(self, name: str, token: str, serial: int) -> None:
        """Removes a checkpoint; one of which only a part is left has no name of a checkpoint.

        Raises:
            OSError: It cannot be removed.
        """
        aside = self.directory / temporary_name(name, token, serial)
        (self.directory / name).rename(aside)
        remove_tree(aside)


def name_order(name: str) -> tuple[int, ...]:
    """Returns what sorts names of checkpoints by position."""
    match = NAME.fullmatch(name)
    return tuple(int(part or 1) for part in match.groups()) if match else ()


def _created(directory: Path) -> str:
    """Returns when a checkpoint was made, in a form that can be compared."""
    try:
        return CheckpointManifest.read(directory).created
    except CheckpointError:
        changed = datetime.fromtimestamp(directory.stat().st_mtime, timezone.utc)
        return timestamp(changed)


def timestamp(moment: datetime) -> str:
    """Returns a time in UTC as manifests contain it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
