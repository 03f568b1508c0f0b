"""A rank of a measuring job that saves the state of a training several times.

``python -m candle_p1.bench.checkpoint_worker DIRECTORY``, alone or under a launcher.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np
import psutil

from candle_p1.bench.checkpoint import (
    SAVES_PER_JOB,
    CheckpointJob,
    CheckpointOutcome,
    TimedSave,
)
from candle_p1.bench.memory import MemorySampler
from candle_p1.bench.savers import SAVERS, StateSaver, sync_tree
from candle_p1.bench.training import prepare_training
from candle_p1.bench.worker import serve
from candle_p1.distributed.comm import on_first_rank
from candle_p1.errors import SetupError
from candle_p1.models.fast.batches import for_fit
from candle_p1.training.state import replicated_arrays

if TYPE_CHECKING:
    from collections.abc import Generator

    from candle_p1.bench.memory import MemorySamples
    from candle_p1.distributed.comm import Communicator

WARM_UP_STEPS = 3
ALONE_STEPS = 6
"""Steps that are timed before each save."""
SAMPLED_S = 2.0
"""How long memory is sampled before the first save, in s."""
MAX_EPOCHS = 1_000_000
"""More than any job trains: the job ends after its last save."""
BLOCK_BYTES = 1 << 26
"""The size of a write of the plain file."""
ROOM = 3
"""The room that is needed, in copies of the state: for two saves and the plain file."""


def measure(job: CheckpointJob, comm: Communicator) -> CheckpointOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot train, or the directory lacks room; the same on every rank.
    """
    training = prepare_training(job, comm)
    (model,) = training.models
    prepare_s = time.time() - psutil.Process().create_time()
    arrays = replicated_arrays(model)
    state_bytes = sum(array.nbytes for array in arrays.values())
    directory = Path(job.directory)
    on_first_rank(lambda: check_room(directory, ROOM * state_bytes), comm)
    target = directory / "saved"
    if comm.rank == 0:
        target.mkdir()
    comm.barrier()
    # Memory that is allocated ahead would count as training's own.
    saver = SAVERS[job.variant](model, comm, target, prepares=job.purpose == "time")
    session = _Session(job, comm, saver, state_bytes)
    batches = for_fit(training.batches())
    model.fit(batches, epochs=MAX_EPOCHS, shuffle=False, verbose=0, callbacks=[session])
    restore_s = saver.finish()
    file_bytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return CheckpointOutcome(
        saves=[
            replace(save, safe_s=safe_s)
            for save, safe_s in zip(session.saves, saver.safe_s, strict=True)
        ],
        state_bytes=state_bytes,
        num_arrays=len(arrays),
        file_bytes=file_bytes,
        prepare_s=prepare_s,
        restore_s=restore_s,
        steps_per_epoch=training.plan.steps_per_epoch,
        batch_size=training.plan.batch_size,
        threads=training.device.threads,
        device=training.device.name,
        training_memory=session.training_memory,
        memory=session.memory,
    )


def check_room(directory: Path, num_bytes: int) -> None:
    """Raises SetupError if a directory's file system has fewer free bytes."""
    free = psutil.disk_usage(str(directory)).free
    if free < num_bytes:
        raise SetupError(
            f"{directory}: there are {free / 1e9:.1f} GB free, but saving needs"
            f" {num_bytes / 1e9:.1f} GB: choose another --directory"
        )


def plain_write_s(path: Path, num_bytes: int) -> float:
    """Returns the time in which this process writes and syncs a file, which is removed again.

    The bytes are random, so that no disk can compress them.
    """
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


class _Session(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves at some steps, and stops the training afterwards.

    Attributes:
        saves: The saves so far; when they were safe, the saver knows in the end.
        training_memory: Samples of the memory before the first save.
        memory: Samples from the first save on.
    """

    def __init__(
        self, job: CheckpointJob, comm: Communicator, saver: StateSaver, state_bytes: int
    ) -> None:
        super().__init__()
        self._job, self._comm, self._saver, self._state_bytes = job, comm, saver, state_bytes
        self.saves: list[TimedSave] = []
        self.training_memory: MemorySamples = []
        self.memory: MemorySamples = []

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._course = self._steps()
        next(self._course)
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        float(logs["loss"])  # waits for a step that is asynchronous
        try:
            self._course.send(time.perf_counter() - self._start)
        except StopIteration:
            self.model.stop_training = True
        self._start = time.perf_counter()

    def _steps(self) -> Generator[None, float, None]:
        """Goes through the steps of the job: each `yield` trains one, and returns its time in s."""
        for _ in range(WARM_UP_STEPS):
            yield
        sampler = MemorySampler() if self._job.purpose == "memory" else None
        begin_s, first_save_s = time.monotonic(), 0.0
        while sampler and self._comm.broadcast(time.monotonic() - begin_s < SAMPLED_S):
            yield
        for number in range(1 + SAVES_PER_JOB):
            alone_s = [0.0] * ALONE_STEPS
            for i in range(ALONE_STEPS):
                alone_s[i] = yield
            plain_s = 0.0
            if self._comm.rank == 0 and sampler is None:
                plain_s = plain_write_s(Path(self._job.directory, "plain"), self._state_bytes)
            self._comm.barrier()
            first_save_s = first_save_s or time.monotonic()
            start = time.perf_counter()
            self._saver.save(number)
            self._comm.barrier()
            wait_s = time.perf_counter() - start
            beside_s = []
            while self._comm.broadcast(self._saver.is_writing()):
                beside_s.append((yield))
            self._saver.sync(start)
            self.saves.append(TimedSave(wait_s, 0.0, plain_s, alone_s, beside_s))
        if sampler is not None:
            samples = sampler.stop()
            self.training_memory = [sample for sample in samples if sample[0] < first_save_s]
            self.memory = [sample for sample in samples if sample[0] >= first_save_s]


if __name__ == "__main__":
    serve(measure)
