"""Prepares a benchmark for training within a measuring job, as a run does."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from candle_p1.bench.task import BenchmarkTask
from candle_p1.benchmark import Benchmark
from candle_p1.data.batches import TrainBatches
from candle_p1.data.reader import Reader, loading
from candle_p1.data.samples import DataSet, Samples
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.distributed.devices import Device
from candle_p1.distributed.engine import Engine, make_engine
from candle_p1.distributed.replicas import broadcast_state
from candle_p1.errors import ParameterError
from candle_p1.models import fast
from candle_p1.models.fast import device_data
from candle_p1.models.fast.tables import taken_by
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.scaling import ScalingPlan
from candle_p1.training.setup import build_model, make_plan, set_up_device
from candle_p1.training.state import attach_state, build_metrics
from candle_p1.training.steps import Steps, make_steps, python_logs

MAX_EPOCHS = 1_000_000
"""So many batches are streamed at most."""


@dataclass
class Training:
    """A benchmark that is ready to train, with a compiled model that has the weights of rank 0."""

    benchmark: Benchmark
    params: ParameterSet
    rank: int
    device: Device
    data: DataSet
    plan: ScalingPlan
    engine: Engine
    model: Any
    matrix_bytes: int

    @property
    def facts(self) -> dict[str, Any]:
        """What outcomes say of a training."""
        return {
            "steps_per_epoch": self.plan.steps_per_epoch,
            "batch_size": self.plan.batch_size,
            "threads": self.device.threads,
            "device": self.device.name,
            "matrix_bytes": self.matrix_bytes,  # those that the ranks of a node share
        }

    def rebuild(self, kernels: str) -> None:
        """Builds the model anew, with these kernels; the one before is forgotten. Collective."""
        self.model = None
        fast.choose(kernels, on_cpu=not self.device.is_gpu)
        build = partial(build_model, self.benchmark, self.params, self.data, self.plan)
        self.model = agree(self.engine.comm, build, self.device, self.engine)
        broadcast_state(self.model, self.engine.reducer)

    def batches(self, samples: Samples | None = None) -> TrainBatches:
        """Returns the batches that this rank trains on; of the training samples by default."""
        samples = samples or taken_by(self.model, self.data.train)
        seed = self.params["rng_seed"]
        return TrainBatches(samples, self.plan, seed=seed, rank=self.rank, shuffle=True)

    def steps(self, model: Any) -> Steps:
        """Returns the steps of a model as runs train them, with JAX from samples on the device."""
        samples = taken_by(model, self.data.train)
        batches = self.batches(samples)
        build_metrics(model, batches[0])
        limit = device_data.limit_bytes(self.engine.comm.local_size)
        (data,) = device_data.place([samples], limit).data or (None,)
        return make_steps(model, batches, data, range(MAX_EPOCHS))


def prepare_training(
    task: BenchmarkTask,
    comm: Communicator,
    *,
    partners: Communicator | None = None,
    num_steps: int = 1,
) -> Training:
    """Sets up the device, loads the data and builds the model; collective.

    `partners` are the ranks that average gradients, all by default; `num_steps` those that an epoch
    must have.

    Raises:
        CandleError: Some rank cannot train; the same on every rank.
    """
    benchmark, params, files = task.locate(comm)
    shared = {"share_gpus": params["share_gpus"]}
    engine = agree(comm, make_engine, params["engine"], partners or comm, **shared)
    device = set_up_device(params, comm, engine)
    engine.start(**{name: params[name] for name in ("averaging", "compression", "deterministic")})
    reader = Reader(files, loading(params, comm, device.threads))

    def prepare() -> Training:
        data = benchmark.preprocess(benchmark.load_data(reader, params), params)
        plan = make_plan(benchmark, params, len(data.train), comm)
        if plan.steps_per_epoch < num_steps:
            raise ParameterError(
                f"an epoch has {plan.steps_per_epoch} steps, but {num_steps} are needed: use fewer"
                " --steps, or --size full"
            )
        model = build_model(benchmark, params, data, plan, device, engine, None)
        size = reader.matrix_bytes
        return Training(benchmark, params, comm.rank, device, data, plan, engine, model, size)

    training = agree(comm, prepare)
    broadcast_state(training.model, engine.reducer)
    return training


Course = Generator[None, tuple[float, float], None]
"""Goes through the steps of a training: each ``yield`` trains one, and returns its time in s, which
includes making the batch, and the mean loss of the epoch so far."""


def step_callback(course: Callable[[Any], Course], base: Any) -> Any:
    """Returns a callback with which a training goes through a course, and stops at its end.

    The course is called with the callback, of keras or tf_keras, when training begins. On JAX, a
    model has its weights during an epoch only where the callback is asked for its ``model``.
    """

    class Callback(base):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self._course = course(self)
            next(self._course)
            self._start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            loss = float(logs["loss"])  # waits for a step that is asynchronous
            try:
                self._course.send((time.perf_counter() - self._start, loss))
            except StopIteration:
                self.model.stop_training = True
            self._start = time.perf_counter()

    return Callback()


def train_as_runs(training: Training, model: Any, callback: Any, num_steps: int) -> None:
    """Trains the first steps of an epoch one by one, as a run with such a callback does."""
    steps = training.steps(model)
    callback.set_model(model)
    model.stop_training = False
    callback.on_train_begin()
    for step in range(num_steps):
        callback.on_train_batch_end(step, python_logs(steps.train(0, step, 1)))
        if model.stop_training:
            break
    attach_state(model)
