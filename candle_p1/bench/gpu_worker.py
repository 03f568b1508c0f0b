"""A rank of a measuring job that trains a benchmark with JAX and times blocks of steps.

``python -m candle_p1.bench.gpu_worker DIRECTORY``, alone or under a launcher. Steps are not timed
one by one, because that would make the host wait for each of them, which a run does not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import keras
import psutil

from candle_p1.bench.gpu import GpuJob, GpuOutcome
from candle_p1.bench.gpu_energy import EnergyMeter
from candle_p1.bench.roofline import matrix_product_flops, optimizer_bytes
from candle_p1.bench.training import prepare_training
from candle_p1.bench.worker import serve
from candle_p1.data.samples import join_batches
from candle_p1.errors import SetupError
from candle_p1.models.fast.batches import for_fit

if TYPE_CHECKING:
    from candle_p1.data.batches import TrainBatches
    from candle_p1.distributed.comm import Communicator

WARM_UP_STEPS = 3
"""Steps that are not timed, after the first one, in which XLA compiles."""
MIN_BLOCKS = 3
MAX_BLOCKS = 10_000
MAX_ARRAY_BYTES = 2 << 30
"""How large the arrays may be with which plain Keras trains; P1B3's would not fit into memory."""


def measure(job: GpuJob, comm: Communicator) -> GpuOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot train; the same on every rank.
    """
    training = prepare_training(job, comm)
    if training.device.is_gpu != (job.device == "gpu"):
        raise SetupError(f"this rank computes on {training.device.name}").on_all_ranks()
    plan, (model,) = training.plan, training.models
    batches = training.batches()
    num_steps = min(job.num_steps, plan.steps_per_epoch)
    options: dict[str, Any] = {"shuffle": False, "verbose": 0}
    if job.inputs == "arrays":
        batch_bytes = sum(array.nbytes for array in keras.tree.flatten(batches[0]))
        num_steps = max(1, min(num_steps, MAX_ARRAY_BYTES // batch_bytes))
        x, y = join_batches([batches[step] for step in range(num_steps)])
        given = {"x": x, "y": y, "batch_size": plan.batch_size}
    else:
        given = {"x": for_fit(_Blocks(batches, num_steps))}
    prepared_s = time.time() - psutil.Process().create_time()
    begin = time.perf_counter()
    model.fit(**given, steps_per_epoch=1, **options)
    first_step_s = time.perf_counter() - begin
    model.fit(**given, steps_per_epoch=min(WARM_UP_STEPS, num_steps), **options)
    timer = _TimedBlocks(comm, job.seconds)
    comm.barrier()
    with EnergyMeter(comm) as meter:
        model.fit(**given, epochs=MAX_BLOCKS, callbacks=[timer], **options)
    steps = len(timer.seconds) * num_steps
    energies_j, no_energy = meter.energies_j(timer.begin_s, timer.end_s)
    return GpuOutcome(
        steps_s=[seconds / num_steps for seconds in timer.seconds],
        steps_per_epoch=plan.steps_per_epoch,
        batch_size=plan.batch_size,
        flops=matrix_product_flops(model, plan.batch_size),
        optimizer_bytes=optimizer_bytes(model),
        prepared_s=prepared_s,
        first_step_s=first_step_s,
        step_energies_j={reading: joules / steps for reading, joules in energies_j.items()},
        no_energy=no_energy,
    )


class _Blocks(keras.utils.PyDataset):  # type: ignore[misc]
    """The batches of an epoch, of which each of Keras's epochs takes a number, round and round.

    Keras itself would end an epoch of ``steps_per_epoch`` early where the batches end.
    """

    def __init__(self, batches: TrainBatches, num_steps: int) -> None:
        super().__init__()
        self._batches, self._num_steps, self._first = batches, num_steps, 0

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> tuple[Any, Any]:
        return self._batches[(self._first + step) % len(self._batches)]

    def on_epoch_end(self) -> None:
        self._first += self._num_steps


class _TimedBlocks(keras.callbacks.Callback):  # type: ignore[misc]
    """Times blocks of steps, which are Keras's epochs, until rank 0 has had enough.

    The first block is not timed: something is still compiled in it.

    Attributes:
        seconds: The time of each block.
        begin_s: When the first one began, by time.perf_counter.
        end_s: When the last one ended.
    """

    def __init__(self, comm: Communicator, limit_s: float) -> None:
        super().__init__()
        self._comm, self._limit_s = comm, limit_s
        self.seconds: list[float] = []
        self.begin_s = self.end_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._start = time.perf_counter()
        if epoch == 1:
            self.begin_s = self._start

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        float(logs["loss"])  # waits for the last step
        self.end_s = time.perf_counter()
        if epoch == 0:
            return
        self.seconds.append(self.end_s - self._start)
        enough = len(self.seconds) >= MIN_BLOCKS and self.end_s - self.begin_s >= self._limit_s
        if self._comm.broadcast(enough):
            self.model.stop_training = True


if __name__ == "__main__":
    serve(measure)
