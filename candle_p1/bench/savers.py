"""Ways to save the state of a training, which `candle-p1 bench checkpoint` compares."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from candle_p1.checkpoints.manifest import Position
from candle_p1.checkpoints.root import CheckpointRoot
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import Communicator
from candle_p1.errors import CandleError


class Saver:
    """A function of Keras's, called on rank 0. Keras syncs nothing, so that is done afterwards.

    All ranks call `save`, `sync` and `finish`. Then `safe_s` has, for each save, the time from its
    begin until its data were on the disk, in s. If the saver `prepares`, it allocates memory before
    training, as a run does.
    """

    def __init__(self, model: Any, comm: Communicator, directory: Path, *, prepares: bool) -> None:
        self.model, self.comm, self.directory = model, comm, directory
        self.safe_s: list[float] = []

    def save(self, number: int) -> None:
        """Saves, or begins to save, for the time with this number, from 0; training waits."""
        if self.comm.rank == 0:
            self.write(number)

    def write(self, number: int) -> None:
        """Writes the files."""

    def is_writing(self) -> bool:
        """Returns whether the last save is still being written beside the training; on rank 0."""
        return False

    def sync(self, start: float) -> None:
        """Waits until the data of the save that began at `start` (perf_counter) are on the disk."""
        if self.comm.rank == 0:
            sync_tree(self.directory)
        self.safe_s.append(time.perf_counter() - start)

    def finish(self) -> float | None:
        """Ends saving, and gives the model the values of the last save, verified.

        Returns the time of the latter, in s; None if it is not measured for this way of saving.
        """
        return None


class BackupSaver(Saver):
    """Keras's callback, as at the end of an epoch; each save overwrites the one before."""

    def __init__(self, model: Any, comm: Communicator, directory: Path, *, prepares: bool) -> None:
        import keras

        super().__init__(model, comm, directory, prepares=prepares)
        self._callback = keras.callbacks.BackupAndRestore(directory, delete_checkpoint=False)
        self._callback.set_model(model)

    def write(self, number: int) -> None:
        self._callback.on_epoch_end(number)


class ModelSaver(Saver):
    """The model with its configuration, in one file, which each save overwrites."""

    def write(self, number: int) -> None:
        self.model.save(self.directory / "model.keras")


class OwnSaver(Saver):
    """What a run with checkpoints does; only the newest one is kept."""

    waits = False

    def __init__(self, model: Any, comm: Communicator, directory: Path, *, prepares: bool) -> None:
        super().__init__(model, comm, directory, prepares=prepares)
        self._writer = CheckpointWriter(
            comm, directory, keep=lambda stored: set(), required=True, say=_raise
        )
        if prepares:
            self._writer.prepare(self._arrays())

    def _arrays(self) -> Any:
        from candle_p1.training.state import replicated_arrays

        return replicated_arrays(self.model)

    def save(self, number: int) -> None:
        self._writer.save(Position(number, 0), self._arrays(), {}, {}, wait=self.waits)

    def is_writing(self) -> bool:
        return self._writer.writing

    def sync(self, start: float) -> None:
        """Does nothing: the writer syncs, and knows when."""

    def finish(self) -> float | None:
        from candle_p1.training.state import restore_replicated

        saves = self._writer.close().saves
        self.safe_s = [save.written_s for save in saves if save.written_s is not None]
        start = time.perf_counter()
        checkpoint = CheckpointRoot(self.directory).newest_good(_raise)
        assert checkpoint is not None
        restore_replicated(self.model, checkpoint.read, checkpoint.arrays)
        return time.perf_counter() - start


class WaitingSaver(OwnSaver):
    """The same where training waits, as it does at the end of a job's time."""

    waits = True


OURS, BACKUP = "candle_p1", "BackupAndRestore"
SAVERS: dict[str, type[Saver]] = {
    OURS: OwnSaver,
    f"{OURS}, waiting": WaitingSaver,
    BACKUP: BackupSaver,
    "model.save": ModelSaver,
}


def sync_tree(directory: Path) -> None:
    """Waits until the files of a directory, and the directory itself, are on the disk."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _raise(message: str) -> None:
    raise CandleError(message)
