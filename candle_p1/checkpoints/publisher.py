"""Completing a checkpoint, naming it, and removing those that are not kept; for rank 0."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.checkpoints.checkpoint import rank_prefix
from candle_p1.checkpoints.job import part_name, remove_markers
from candle_p1.checkpoints.layout import ArraySpec, PartLayout, Piece, piece_key
from candle_p1.checkpoints.leftovers import WriterClaim, remove_tree, temporary_name
from candle_p1.checkpoints.manifest import (
    MANIFEST,
    RANKS_FILE,
    ArrayEntry,
    CheckpointManifest,
    EarlierEntry,
    FileEntry,
    PieceEntry,
    Position,
    PositionEntry,
)
from candle_p1.checkpoints.memory import CopyMemory
from candle_p1.checkpoints.part_file import sync_directory, write_synced
from candle_p1.checkpoints.root import BEST, LATEST, CheckpointRoot, StoredCheckpoint
from candle_p1.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.checkpoints.checkpoint import Checkpoint
    from candle_p1.checkpoints.sharing import WritePlan

    RankState = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    Attributes:
        directory: Its temporary directory.
        serial: Its number among those of the writer.
        position: How far training had come.
        created: When it was saved.
        best: Whether it is the best so far.
        facts: What the state consists of beside arrays; JSON.
        plan: Who writes what.
    """

    directory: Path
    serial: int
    position: Position
    created: str
    best: bool
    facts: dict[str, Any]
    plan: WritePlan


class Publisher:
    """Gives checkpoints their names, and removes those that are not kept.

    Args:
        root: The directory of the checkpoints.
        claim: The sign that the writer is alive.
        keep: Chooses, of all checkpoints of the run, those that are kept. The latest and the best
            are kept in any case.
        after: The checkpoint that the run goes on from, if any.
    """

    def __init__(
        self,
        root: Path,
        claim: WriterClaim,
        keep: Callable[[Collection[StoredCheckpoint]], set[StoredCheckpoint]],
        after: Checkpoint | None,
    ) -> None:
        self._root = CheckpointRoot(root)
        self._claim, self._token = claim, claim.token
        self._keep = keep
        self._numbers: dict[str, int] = {}  # of this run's checkpoints, the oldest first
        self._number = 0 if after is None else after.manifest.number
        if after is not None and after.directory.parent == root.resolve():
            self._numbers = {each.name: each.number for each in reversed(after.manifest.before)}
            self._numbers[after.directory.name] = self._number
        self._num_removed = 0

    @property
    def newest(self) -> str | None:
        """The name of the newest checkpoint of this run."""
        return next(reversed(self._numbers), None)

    def begin(self, draft: Draft) -> None:
        """Makes the temporary directory of a checkpoint, and claims it.

        Raises:
            OSError: It cannot be made.
        """
        self._claim.acquire(self._root.directory)
        draft.directory.mkdir(exist_ok=True)

    def publish(
        self, draft: Draft, rank_states: Sequence[RankState], files: Mapping[str, FileEntry]
    ) -> str:
        """Completes a checkpoint whose parts are written, and names it.

        When this returns, it is safe, and the links name it.

        Args:
            draft: The checkpoint.
            rank_states: The arrays of every rank's own, by name.
            files: The size and digest of every part, by the name of its file.

        Returns:
            The name of its directory.

        Raises:
            OSError: It cannot be completed.
            CheckpointError: A file has been removed meanwhile.
        """
        directory = draft.directory
        files = {**files, RANKS_FILE: _write_rank_states(directory, rank_states)}
        _write_manifest(directory, self._manifest(draft, len(rank_states), files))
        remove_markers(directory)
        for name, entry in files.items():
            if _size(directory / name) != entry.bytes:
                raise CheckpointError(f"{directory / name} was changed while it was written")
        sync_directory(directory)
        root = self._root.directory
        name = self._rename(draft)
        sync_directory(root)
        for link in _links(draft):
            (root / temporary_name(link, self._token, draft.serial)).replace(root / link)
        sync_directory(root)
        self._number += 1
        self._numbers[name] = self._number
        return name

    def remove_others(self) -> None:
        """Removes the checkpoints of this run that are not kept.

        Raises:
            OSError: One cannot be removed.
        """
        latest, best = self._root.linked(LATEST), self._root.linked(BEST)
        stored = [
            StoredCheckpoint(name, number, latest=name == latest, best=name == best)
            for name, number in self._present().items()
        ]
        kept = self._keep(stored)
        for each in stored:
            if each not in kept and not each.latest and not each.best:
                self._num_removed += 1
                self._root.remove(each.name, self._token, self._num_removed)
        self._numbers = self._present()

    def discard(self, draft: Draft) -> None:
        """Removes what there is of a checkpoint that could not be completed.

        Raises:
            OSError: It cannot be removed.
        """
        if draft.directory.exists():
            remove_tree(draft.directory)
        for link in _links(draft):
            unfinished = self._root.directory / temporary_name(link, self._token, draft.serial)
            if (
                not unfinished.is_dir()
            ):  # one that names a complete checkpoint is for the next start
                unfinished.unlink(missing_ok=True)

    def _present(self) -> dict[str, int]:
        there = set(self._root.names())
        return {name: number for name, number in self._numbers.items() if name in there}

    def _rename(self, draft: Draft) -> str:
        """Gives a directory the first free name of its position; the links are made before.

        So if the writer is killed after this, the next start knows where they should lead.
        """
        root = self._root.directory
        for number in count(1):
            name = draft.position.name + (f"-{number}" if number > 1 else "")
            if os.path.lexists(root / name):
                continue
            for link in _links(draft):
                unfinished = root / temporary_name(link, self._token, draft.serial)
                unfinished.unlink(missing_ok=True)
                unfinished.symlink_to(name)
            try:
                draft.directory.rename(root / name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another run was faster
                    raise
            else:
                return name
        raise AssertionError("numbers do not end")

    def _manifest(
        self, draft: Draft, num_ranks: int, files: Mapping[str, FileEntry]
    ) -> CheckpointManifest:
        plan = draft.plan
        pieces: dict[str, list[PieceEntry]] = {name: [] for name in plan.specs}
        for part, held in enumerate(plan.parts):
            for piece in held:
                key = piece_key(piece, plan.specs[piece.array])
                rows = (piece.start, piece.stop)
                pieces[piece.array].append(PieceEntry(file=part_name(part), key=key, rows=rows))
        return CheckpointManifest(
            created=draft.created,
            position=PositionEntry(epoch=draft.position.epoch, step=draft.position.step),
            number=self._number + 1,
            best=draft.best,
            num_ranks=num_ranks,
            before=[
                EarlierEntry(name=name, number=number)
                for name, number in reversed(self._present().items())
            ],
            facts=draft.facts,
            files=dict(files),
            arrays={
                name: ArrayEntry(dtype=spec.dtype, shape=spec.shape, pieces=pieces[name])
                for name, spec in plan.specs.items()
            },
        )


def _links(draft: Draft) -> list[str]:
    return [BEST, LATEST] if draft.best else [LATEST]


def _size(path: Path) -> int:
    """Returns the size of a file that another node may have written.

    Opening it has NFS ask the server; `stat` alone may tell the size at an earlier moment.
    """
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def _write_rank_states(directory: Path, rank_states: Sequence[RankState]) -> FileEntry:
    arrays = {
        rank_prefix(rank) + name: array
        for rank, state in enumerate(rank_states)
        for name, array in state.items()
    }
    specs = {name: ArraySpec.of(name, array) for name, array in arrays.items()}
    layout = PartLayout(specs, [Piece(name, 0, spec.num_rows) for name, spec in specs.items()])
    memory = CopyMemory(layout.num_bytes)
    for piece, values in layout.fill(memory):
        np.copyto(values, arrays[piece.array])
    return write_synced(directory / RANKS_FILE, memory.buffer, memory.num_bytes)


def _write_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    with (directory / MANIFEST).open("xb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())
