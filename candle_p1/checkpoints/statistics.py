"""What was saved, what it cost, and what failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.checkpoints.manifest import Position


@dataclass
class SaveRecord:
    """One checkpoint that was begun.

    Attributes:
        position: How far training had come.
        num_bytes: The size of its files.
        num_writers: The ranks that wrote it.
        wait_s: How long training waited on this rank: for the ranks to agree and for the copy, and,
            if it was asked to wait, until the checkpoint was safe.
        written_s: From the beginning of the save until the checkpoint was safe; None if it failed.
        name: The name of its directory; None if it failed.
        error: Why it failed.
    """

    position: Position
    num_bytes: int
    num_writers: int
    wait_s: float = 0.0
    written_s: float | None = None
    name: str | None = None
    error: str | None = None

    def take(self, known: SaveRecord) -> None:
        """Takes over what rank 0 knows: everything but how long this rank waited."""
        self.num_bytes, self.written_s = known.num_bytes, known.written_s
        self.name, self.error = known.name, known.error


@dataclass
class CheckpointStatistics:
    """What a writer has done.

    Attributes:
        directory: Where the checkpoints are.
        saves: The checkpoints that were begun, in order.
        num_not_taken: How often one was due while the one before was still being written.
        copy_bytes: The memory on this rank for the copy of its share of the state.
    """

    directory: Path
    saves: list[SaveRecord] = field(default_factory=list)
    num_not_taken: int = 0
    copy_bytes: int = 0

    @property
    def written(self) -> list[SaveRecord]:
        """The checkpoints that were completed."""
        return [save for save in self.saves if save.name is not None]

    @property
    def errors(self) -> list[str]:
        """Why checkpoints failed."""
        return [save.error for save in self.saves if save.error is not None]
