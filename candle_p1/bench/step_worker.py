"""A rank of a measuring job: trains a benchmark for some steps, and says what each took.

``python -m candle_p1.bench.step_worker DIRECTORY``, by itself or under a launcher.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from candle_p1.bench.memory import MemorySampler
from candle_p1.bench.roofline import (
    copy_bytes_per_s,
    matmul_flops_per_s,
    matrix_product_flops,
    optimizer_bytes,
    state_bytes,
)
from candle_p1.bench.step_job import MAX_COMPARED, WARM_UP_STEPS, StepJob, StepOutcome
from candle_p1.bench.training import one_epoch, prepare_training
from candle_p1.bench.worker import serve
from candle_p1.benchmark import find_benchmark
from candle_p1.data.batches import TrainBatches
from candle_p1.distributed.comm import Attempt, SerialCommunicator
from candle_p1.errors import ParameterError
from candle_p1.models.fast.batches import for_fit

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.benchmark import Benchmark
    from candle_p1.data.samples import DataSet, Samples
    from candle_p1.distributed.comm import Communicator
    from candle_p1.parameters.parameter_set import ParameterSet


def measure(directory: Path, comm: Communicator) -> StepOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot train; the same on every rank.
    """
    job = StepJob.read(directory)
    benchmark = Attempt(lambda: find_benchmark(job.benchmark)).agree(comm)
    params = Attempt(lambda: bind(benchmark, job)).agree(comm)
    partners = comm if job.exchange else SerialCommunicator()
    training = prepare_training(benchmark, params, comm, partners=partners, num_steps=steps_of(job))
    device, data, plan, (model,), matrix_bytes = training
    steps = _Steps(comm, samples_memory=job.measures_machine)
    batches = TrainBatches(
        _samples(benchmark, data, job), plan, seed=params["rng_seed"], rank=comm.rank, shuffle=True
    )
    epoch: dict[str, Any] = {"shuffle": False, "verbose": 0, "callbacks": [steps]}
    if job.inputs == "arrays":
        parts = [batches[step] for step in range(steps_of(job))]
        x, y = (_join([batch[i] for batch in parts]) for i in (0, 1))
        del parts
        model.fit(x, y, batch_size=plan.batch_size, **epoch)
    else:
        model.fit(for_fit(batches), steps_per_epoch=steps_of(job), **epoch)
    outcome = StepOutcome(
        steps_s=steps.seconds[WARM_UP_STEPS : WARM_UP_STEPS + job.num_steps],
        losses=steps.losses,
        updates=steps.updates,
        batch_size=plan.batch_size,
        threads=device.threads,
        device=device.name,
        flops=matrix_product_flops(model, plan.batch_size),
        optimizer_bytes=optimizer_bytes(model),
        state_bytes=state_bytes(model),
        matrix_bytes=matrix_bytes,
        memory=steps.memory,
    )
    if not job.measures_machine:
        return outcome
    return replace(
        outcome,
        matmul_flops_per_s=matmul_flops_per_s(),
        copy_bytes_per_s=copy_bytes_per_s(device.threads),
    )


def steps_of(job: StepJob) -> int:
    """Returns all steps of a job: the memory is sampled in one that is not timed."""
    return WARM_UP_STEPS + job.num_steps + job.measures_machine


def bind(benchmark: Benchmark, job: StepJob) -> ParameterSet:
    """Returns the parameters of a benchmark for a job.

    Raises:
        CandleError: A flag is wrong, or names the kernels, or a file is missing.
    """
    params = benchmark.read_parameters(job.flags)
    if params.origin("kernels").kind == "flag":
        raise ParameterError("--kernels is not for a comparison: it measures both")
    return one_epoch(params, kernels=job.kernels)


def _samples(benchmark: Benchmark, data: DataSet, job: StepJob) -> Samples:
    if job.inputs in ("samples", "arrays"):
        return data.train
    return benchmark.other_samples(data)[job.inputs]


def _join(parts: list[Any]) -> Any:
    """Returns batches as one, of one input or of several."""
    if isinstance(parts[0], tuple):
        return tuple(np.concatenate(inputs) for inputs in zip(*parts, strict=True))
    return np.concatenate(parts)


class _Steps(keras.callbacks.Callback):  # type: ignore[misc]
    """Times steps, from the end of one to the end of the next, so with the making of the batch.

    Attributes:
        seconds: Of every step.
        losses: The mean of the epoch so far, after every step.
        updates: See StepOutcome.
        memory: Samples during the last step.
    """

    def __init__(self, comm: Communicator, *, samples_memory: bool) -> None:
        super().__init__()
        self._comm, self._samples_memory = comm, samples_memory
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.updates: dict[str, list[float]] = {}
        self.memory: list[tuple[float, int]] = []
        self._sampler: MemorySampler | None = None

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._before = self._weights()
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        self.losses.append(float(logs["loss"]))  # waits for the step, where it is asynchronous
        self.seconds.append(time.perf_counter() - self._start)
        if len(self.seconds) == WARM_UP_STEPS:
            after = self._weights()
            self.updates = {name: (after[name] - self._before[name]).tolist() for name in after}
            del self._before
            self._comm.barrier()
        if self._samples_memory and len(self.seconds) == self.params["steps"] - 1:
            self._sampler = MemorySampler().__enter__()
        self._start = time.perf_counter()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        if self._sampler:
            self.memory = self._sampler.stop()

    def _weights(self) -> dict[str, NDArray[np.float64]]:
        """Returns some elements of every trainable weight, evenly spread."""
        some = {}
        for number, weight in zip(itertools.count(), self.model.trainable_weights):
            values = keras.ops.convert_to_numpy(weight.value).reshape(-1)
            some[f"{number} {weight.path}"] = values[:: -(-len(values) // MAX_COMPARED)].astype(
                float
            )
        return some


if __name__ == "__main__":
    serve(measure)
