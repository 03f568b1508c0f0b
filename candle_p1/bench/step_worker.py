"""A rank of a measuring job that trains a benchmark for some steps and times each of them.

``python -m candle_p1.bench.step_worker DIRECTORY``, alone or under a launcher.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from candle_p1.bench.memory import MemorySampler
from candle_p1.bench.roofline import bound, matrix_product_flops, state_bytes
from candle_p1.bench.step import MAX_COMPARED, WARM_UP_STEPS, StepJob, StepOutcome
from candle_p1.bench.training import prepare_training
from candle_p1.bench.worker import backend_version, serve
from candle_p1.data.samples import join_batches
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.models import fast
from candle_p1.models.fast.batches import for_fit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from candle_p1.bench.memory import MemorySamples
    from candle_p1.distributed.comm import Communicator


def measure(job: StepJob, comm: Communicator) -> StepOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot train; the same on every rank.
    """
    partners = comm if job.averages_gradients else SerialCommunicator()
    training = prepare_training(job, comm, partners=partners, num_steps=job.all_steps)
    device, data, plan, (model,) = training.device, training.data, training.plan, training.models
    own_samples = job.inputs in ("samples", "arrays")
    samples = data.train if own_samples else training.benchmark.other_samples(data)[job.inputs]
    batches = training.batches(samples)
    timer = _StepTimer(comm, samples_memory=job.measures_machine)
    epoch: dict[str, Any] = {"shuffle": False, "verbose": 0, "callbacks": [timer]}
    if job.inputs == "arrays":
        parts = [batches[step] for step in range(job.all_steps)]
        x, y = join_batches(parts)
        del parts
        model.fit(x, y, batch_size=plan.batch_size, **epoch)
    else:
        model.fit(for_fit(batches), steps_per_epoch=job.all_steps, **epoch)
    return StepOutcome(
        steps_s=timer.seconds[WARM_UP_STEPS : WARM_UP_STEPS + job.num_steps],
        losses=timer.losses,
        updates=timer.updates,
        batch_size=plan.batch_size,
        threads=device.threads,
        device=device.name,
        backend=backend_version(),
        has_fast_kernels=fast.exist(on_cpu=not device.is_gpu),
        flops=matrix_product_flops(model, plan.batch_size),
        state_bytes=state_bytes(model),
        matrix_bytes=training.matrix_bytes,
        roofline=bound(model, plan.batch_size, device.threads) if job.measures_machine else None,
        memory=timer.memory,
    )


class _StepTimer(keras.callbacks.Callback):  # type: ignore[misc]
    """Times each step from the end of the one before, which includes making the batch.

    Attributes:
        seconds: The time of every step.
        losses: The mean loss of the epoch so far, after every step.
        updates: See StepOutcome.
        memory: Memory samples during the last step.
    """

    def __init__(self, comm: Communicator, *, samples_memory: bool) -> None:
        super().__init__()
        self._comm, self._samples_memory = comm, samples_memory
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.updates: dict[str, list[float]] = {}
        self.memory: MemorySamples = []
        self._sampler: MemorySampler | None = None

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._before = self._weights()
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        self.losses.append(float(logs["loss"]))  # waits for a step that is asynchronous
        self.seconds.append(time.perf_counter() - self._start)
        if len(self.seconds) == WARM_UP_STEPS:
            after = self._weights()
            self.updates = {name: (after[name] - self._before[name]).tolist() for name in after}
            del self._before
            self._comm.barrier()
        if self._samples_memory and len(self.seconds) == self.params["steps"] - 1:
            self._sampler = MemorySampler()
        self._start = time.perf_counter()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        if self._sampler:
            self.memory = self._sampler.stop()

    def _weights(self) -> dict[str, NDArray[np.float64]]:
        """Returns some elements of every trainable weight, evenly spaced."""
        elements = {}
        for number, weight in enumerate(self.model.trainable_weights):
            values = keras.ops.convert_to_numpy(weight.value).reshape(-1)
            stride = -(-len(values) // MAX_COMPARED)
            elements[f"{number} {weight.path}"] = values[::stride].astype(float)
        return elements


if __name__ == "__main__":
    serve(measure)
