"""Trains and saves the state several times, in a way that `candle-p1 bench checkpoint` compares."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from candle_p1.bench.node_state import MemorySampler
from candle_p1.bench.task import BenchmarkTask, Outcome
from candle_p1.checkpoints.checkpoint import CheckpointRoot
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import Communicator, on_first_rank
from candle_p1.errors import CandleError, SetupError
from candle_p1.records.types import Position

if TYPE_CHECKING:
    from candle_p1.bench.training import Course

WARM_UP_STEPS = 3
ALONE_STEPS = 6  # that are timed before each save
SAVES_PER_JOB = 2  # that are timed, after a first one
MAX_EPOCHS = 1_000_000  # more than any job trains: it ends after its last save
SAMPLED_S = 2.0  # how long memory is sampled before the first save
BLOCK_BYTES = 1 << 26  # of a write of the plain file
ROOM = 3  # copies of the state: of two saves and the plain file


def _backup(model: Any, directory: Path) -> Callable[[int], Any]:
    import keras

    callback = keras.callbacks.BackupAndRestore(directory, delete_checkpoint=False)
    callback.set_model(model)
    save: Callable[[int], Any] = callback.on_epoch_end
    return save


def _whole_model(model: Any, directory: Path) -> Callable[[int], Any]:
    return lambda save: model.save(directory / "model.keras")


OURS, WAITING, BACKUP = "candle_p1", "candle_p1, waiting", "BackupAndRestore"
KERAS = {BACKUP: _backup, "model.save": _whole_model}
"""Keras's ways to save: what makes a function of the save's number. They overwrite the last one."""
VARIANTS = (OURS, WAITING, *KERAS)


@dataclass(frozen=True, kw_only=True)
class CheckpointTask(BenchmarkTask):
    """Saves the state of a training several times, in one of VARIANTS."""

    variant: str = OURS
    directory: str = "."
    samples_memory: bool = False

    def measure(self, comm: Communicator) -> Outcome:
        import keras

        from candle_p1.bench.training import prepare_training, step_callback
        from candle_p1.models.fast.batches import for_fit
        from candle_p1.training.state import replicated_arrays, restore_replicated

        training = prepare_training(self, comm)
        model = training.model
        prepare_s = time.time() - psutil.Process().create_time()
        arrays = replicated_arrays(model)
        state_bytes = sum(array.nbytes for array in arrays.values())
        target, writer, restore_s = Path(self.directory, "saved"), None, None
        on_first_rank(comm, make_room, target, ROOM * state_bytes)
        if self.variant in KERAS:
            save = KERAS[self.variant](model, target)
        else:
            # Only the newest checkpoint is kept.
            writer = CheckpointWriter(
                comm, target, keep=lambda numbers: set(), required=True, say=_raise
            )
            if not self.samples_memory:  # it would count as training's own
                writer.prepare(arrays)

            def save(number: int) -> None:
                position, is_waited_for = Position(number, 0), self.variant == WAITING
                writer.save(position, replicated_arrays(model), {}, {}, wait=is_waited_for)

        found: Outcome = {"saves": [], "training_memory": [], "memory": []}
        callback = step_callback(
            lambda _: self._course(comm, save, writer, state_bytes, found), keras.callbacks.Callback
        )
        batches = for_fit(training.batches())
        model.fit(batches, epochs=MAX_EPOCHS, shuffle=False, verbose=0, callbacks=[callback])
        if writer:
            for times, written in zip(found["saves"], writer.close().saves, strict=True):
                times["safe_s"] = written.written_s
            start = time.perf_counter()
            checkpoint = CheckpointRoot(target).newest_good(_raise)
            assert checkpoint is not None
            restore_replicated(model, checkpoint.read, checkpoint.arrays)
            restore_s = time.perf_counter() - start
        return {
            **training.facts,
            **found,
            "state_bytes": state_bytes,
            "num_arrays": len(arrays),
            "file_bytes": sum(p.stat().st_size for p in target.rglob("*") if p.is_file()),
            "prepare_s": prepare_s,
            "restore_s": restore_s,
        }

    def _course(
        self,
        comm: Communicator,
        save: Callable[[int], Any],
        writer: CheckpointWriter | None,
        state_bytes: int,
        found: Outcome,
    ) -> Course:
        """Trains and saves; adds the times of each save, and memory, to what is found.

        Training waits for ``wait_s``, and the data are on the disk after ``safe_s``; one process
        has written as many bytes in ``plain_s`` just before, 0 on other ranks than 0. Steps take
        ``alone_s`` before a save, and ``beside_s`` while it is being written: compare their means,
        not medians, because those at the end of an epoch take longer.
        """
        for _ in range(WARM_UP_STEPS):
            yield
        sampler = MemorySampler() if self.samples_memory else None
        begin_s, first_save_s = time.monotonic(), 0.0
        while sampler and comm.broadcast(time.monotonic() - begin_s < SAMPLED_S):
            yield
        for index in range(1 + SAVES_PER_JOB):
            alone_s, beside_s, plain_s = [0.0] * ALONE_STEPS, [], 0.0
            for i in range(ALONE_STEPS):
                alone_s[i], _ = yield
            if comm.rank == 0 and sampler is None:
                plain_s = plain_write_s(Path(self.directory, "plain"), state_bytes)
            comm.barrier()
            first_save_s = first_save_s or time.monotonic()
            start = time.perf_counter()
            if writer or comm.rank == 0:
                save(index)
            comm.barrier()
            times = {"wait_s": time.perf_counter() - start, "plain_s": plain_s, "alone_s": alone_s}
            while writer and comm.broadcast(writer.writing):
                seconds, _ = yield
                beside_s.append(seconds)
            if comm.rank == 0 and not writer:  # Keras syncs nothing
                sync_tree(Path(self.directory, "saved"))
            safe_s = time.perf_counter() - start
            found["saves"].append({**times, "beside_s": beside_s, "safe_s": safe_s})
        for time_s, num_bytes in sampler.stop() if sampler else ():
            name = "training_memory" if time_s < first_save_s else "memory"
            found[name].append((time_s, num_bytes))


def _raise(message: str) -> None:
    raise CandleError(message)


def make_room(directory: Path, num_bytes: int) -> None:
    """Makes a directory; raises SetupError if its file system has fewer free bytes."""
    free = psutil.disk_usage(str(directory.parent)).free
    if free < num_bytes:
        raise SetupError(
            f"{directory.parent}: there are {free / 1e9:.1f} GB free, but saving needs"
            f" {num_bytes / 1e9:.1f} GB: choose another --directory"
        )
    directory.mkdir()


def sync_tree(directory: Path) -> None:
    """Waits until the files of a directory, and the directory itself, are on the disk."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def plain_write_s(path: Path, num_bytes: int) -> float:
    """Returns how long this process writes and syncs random bytes, whose file is removed again."""
    block = np.random.default_rng(0).bytes(min(BLOCK_BYTES, num_bytes))
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for begin in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - begin])
        os.fsync(file.fileno())
    sync_tree(path.parent)
    elapsed_s = time.perf_counter() - start
    path.unlink()
    return elapsed_s
