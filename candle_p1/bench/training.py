"""A benchmark that trains in a measuring job as in a run, and what a step of it costs at least.

The roofline bound is that of a step's matrix products and the optimizer's memory traffic, both
derived from the model, at the rates of this machine, which the same job measures with the same
threads. Where the fast kernels compute a convolution by fewer multiplications, there is a second
bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from candle_p1.bench.task import BenchmarkTask, seconds_of
from candle_p1.benchmark import Benchmark
from candle_p1.data.reader import Reader, loading
from candle_p1.data.samples import DataSet, Samples
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.distributed.devices import Device
from candle_p1.distributed.engine import Engine, make_engine
from candle_p1.distributed.replicas import broadcast_state
from candle_p1.errors import ParameterError
from candle_p1.models import fast
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.scaling import ScalingPlan, share_bounds
from candle_p1.training.setup import build_model, make_plan, set_up_device

MAX_EPOCHS = 1_000_000  # more than any job trains
MATRIX_SIZES, LONG_S = (1024, 2048, 4096), 0.1  # the first of which a product takes so long
COPY_BYTES, REPEATS = 1 << 28, 5


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
    matrix_bytes: int  # those that the ranks of a node share

    @property
    def facts(self) -> dict[str, Any]:
        """What outcomes say of a training."""
        return {
            "steps_per_epoch": self.plan.steps_per_epoch,
            "batch_size": self.plan.batch_size,
            "threads": self.device.threads,
            "device": self.device.name,
            "matrix_bytes": self.matrix_bytes,
        }

    def rebuild(self, kernels: str) -> None:
        """Builds the model anew, with these kernels; the one before is forgotten. Collective."""
        self.model = None
        fast.choose(kernels, on_cpu=not self.device.is_gpu)
        what = (self.benchmark, self.params, self.data, self.plan, self.device, self.engine)
        self.model = agree(self.engine.comm, build_model, *what)
        broadcast_state(self.model, self.engine.reducer)

    def batches(self, samples: Samples | None = None) -> Any:
        """Returns the batches that this rank trains on; of the training samples by default."""
        from candle_p1.data.batches import TrainBatches
        from candle_p1.models.fast.batches import taken_by

        samples, seed = samples or taken_by(self.model, self.data.train), self.params["rng_seed"]
        return TrainBatches(samples, self.plan, seed=seed, rank=self.rank, shuffle=True)

    def steps(self) -> Any:
        """Returns the steps of the model as runs train them, with JAX from data on the device."""
        from candle_p1.models.fast import device_data
        from candle_p1.models.fast.batches import taken_by
        from candle_p1.training.state import build_metrics
        from candle_p1.training.steps import make_steps

        build_metrics(self.model, self.batches()[0])
        limit_bytes = device_data.limit_bytes(self.engine.comm.local_size)
        samples = taken_by(self.model, self.data.train)
        (data,) = device_data.place([samples], limit_bytes).data or (None,)
        return make_steps(self.model, self.batches(), data, range(MAX_EPOCHS))


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
        model = build_model(benchmark, params, data, plan, device, engine)
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


def bound(model: Any, batch_size: int, num_threads: int) -> dict[str, float] | None:
    """Returns the shortest possible time of a step, ``total_s``, and what it is derived from.

    ``total_s`` is the bound of the direct form of all products; ``used_total_s`` that of the form
    in use, of whose transforms nothing is counted. None if the operations are not known.
    """
    flops, num_bytes = matrix_product_flops(model, batch_size), optimizer_bytes(model)
    used = matrix_product_flops(model, batch_size, as_computed=True)
    used_bytes = optimizer_bytes(model, as_computed=True)
    if flops is None or used is None:
        return None
    flops_per_s, bytes_per_s = matmul_flops_per_s(), copy_bytes_per_s(num_threads)
    optimizer_s = num_bytes / bytes_per_s
    return {
        "flops": flops,
        "used_flops": used,
        "matmul_flops_per_s": flops_per_s,
        "gemm_s": flops / flops_per_s,
        "optimizer_bytes": num_bytes,
        "copy_bytes_per_s": bytes_per_s,
        "optimizer_s": optimizer_s,
        "total_s": flops / flops_per_s + optimizer_s,
        "used_total_s": used / flops_per_s + used_bytes / bytes_per_s,
    }


def matrix_product_flops(model: Any, batch_size: int, *, as_computed: bool = False) -> float | None:
    """Returns the number of floating-point operations in the matrix products of a step.

    A product of (m, k) and (k, n) has 2 m k n, which the forward pass and the gradients of weights
    and of inputs need each; the inputs of the first layer need no gradient. Counts dense layers and
    convolutions, in the direct form or as the chosen kernels compute them. None if a layer is used
    several times, or the shape of its output is not known.
    """
    import keras

    from candle_p1.models.fast.layers import Conv1D
    from candle_p1.models.fast.tables import TableDense

    kinds = (keras.layers.Dense, *(getattr(keras.layers, f"Conv{n}D") for n in (1, 2, 3)))
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kinds)]
    flops = 0.0
    for i, layer in enumerate(layers):
        try:
            shape = layer.output.shape
        except (AttributeError, ValueError):
            return None
        first = getattr(layer, "data_format", None) == "channels_first"
        positions = shape[2:] if first else shape[1:-1]
        if None in positions:
            return None
        weights = math.prod(layer.kernel.shape)
        if as_computed and isinstance(layer, Conv1D):
            weights = layer.multiplications()
        elif as_computed and getattr(layer, "sparse", None):
            weights *= layer.sparse.density
        elif isinstance(layer, TableDense) and not as_computed:
            weights = layer.num_products
        forward = 2.0 * batch_size * math.prod(positions) * weights
        flops += forward * (3 if i else 2)
    return flops


def optimizer_bytes(model: Any, *, as_computed: bool = False) -> int:
    """Returns the bytes an update reads (weights, gradients, state) and writes (weights, state).

    They are those of whole kernels, or of what the chosen kernels update. A layer of sparse inputs
    has no gradient to read, but its product, of few operations, reads the kernel: as many bytes.
    """
    from candle_p1.models.fast.tables import table_layer

    state = [variable for variable in model.optimizer.variables if variable.ndim > 0]
    num_bytes = _num_bytes(model.trainable_weights)
    all_bytes = 3 * num_bytes + 2 * _num_bytes(state)  # without counters
    if not as_computed and (layer := table_layer(model)):
        missing = layer.num_whole * np.dtype(layer.kernel.dtype).itemsize
        missing -= _num_bytes(layer.trainable_weights)
        return all_bytes * (num_bytes + missing) // num_bytes
    return all_bytes


def state_bytes(model: Any) -> int:
    """Returns the bytes of the weights, their gradients and the optimizer's state."""
    gradients = _num_bytes(model.trainable_weights)
    return _num_bytes(model.weights) + gradients + _num_bytes(model.optimizer.variables)


def _num_bytes(variables: list[Any]) -> int:
    return sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables)


def matmul_flops_per_s() -> float:
    """Returns the rate of float32 matrix products, with the threads the framework uses here."""
    import keras

    random, size, product_s = np.random.default_rng(0).random, 0, 0.0

    def multiply() -> None:
        product = keras.ops.matmul(matrix, matrix)
        np.asarray(keras.ops.convert_to_numpy(product[0, 0]))  # waits for the product

    for size in MATRIX_SIZES:
        matrix = keras.ops.convert_to_tensor(random((size, size), dtype=np.float32))
        product_s = seconds_of(multiply, REPEATS)
        if product_s > LONG_S:
            break
    return 2.0 * size**3 / product_s


def copy_bytes_per_s(num_threads: int) -> float:
    """Returns the rate of copying a large array: bytes read plus bytes written."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    parts = [slice(*share_bounds(COPY_BYTES, i, num_threads)) for i in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

        return 2.0 * COPY_BYTES / seconds_of(copy, REPEATS)
