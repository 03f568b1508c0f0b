"""Horovod as an engine of data-parallel training with Keras 3 on TensorFlow.

Horovod's own ``hvd.DistributedOptimizer`` overrides a method that Keras 3 never calls: it raises no
error and averages nothing. This adapter uses Horovod's operations directly, in the one method that
every Keras 3 optimizer goes through, ``apply(gradients, variables)``. With one rank every function
here does nothing and needs neither TensorFlow nor Horovod.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed.comm import Attempt
from candle_p1.distributed.compression import LARGEST_BYTES, average_as_half
from candle_p1.distributed.mpi_library import check_thread_level
from candle_p1.distributed.timeline import TIMELINE_VARIABLE
from candle_p1.errors import DistributedError, SetupError
from candle_p1.instrument.collectives import note_collective
from candle_p1.ops import read_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.distributed.allreduce_log import AllreduceLog
    from candle_p1.distributed.comm import Communicator

STALL_CHECK_S = 60
HOROVOD_DEFAULTS = {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": "134217728"}
"""The defaults of Horovod 0.28, in ms and bytes; when the paper was written: 5 and 67108864."""


def start_horovod(
    comm: Communicator,
    *,
    stall_shutdown_s: int = 300,
    deterministic: bool = True,
    timeline: Path | None = None,
) -> dict[str, Any]:
    """Initializes Horovod on the ranks of `comm`; collective.

    Horovod's variables that are already set in the environment take precedence.

    Args:
        comm: The ranks.
        stall_shutdown_s: The time after which a stalled collective ends with an error on every
            rank; 0: never.
        deterministic: Whether repeated runs must be bit-identical.
        timeline: The file into which Horovod on rank 0 traces its operations; None: no file.

    Returns:
        The record's section "distributed".

    Raises:
        SetupError: Horovod is missing, was built without MPI, or does not see the ranks of `comm`;
            MPI must not be called from several threads.
    """
    if comm.size == 1:
        return {"backend": "serial"}
    check = min(STALL_CHECK_S, stall_shutdown_s // 2) if stall_shutdown_s else STALL_CHECK_S
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(check, 1)))
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(stall_shutdown_s))
    if deterministic:
        # Timing decides which gradients are fused and thereby, from three ranks on, the order in
        # which MPI adds.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    if timeline is not None:
        os.environ[TIMELINE_VARIABLE] = str(timeline)
    hvd = Attempt(_horovod).agree(comm)
    check_thread_level(comm)
    hvd.init()

    def compare() -> None:
        if (hvd.rank(), hvd.size()) != (comm.rank, comm.size):
            raise SetupError(
                f"this is rank {hvd.rank()} of {hvd.size()} for Horovod and rank {comm.rank} of"
                f" {comm.size} for mpi4py: they use different MPI libraries. Rebuild one of them;"
                " candle-p1 doctor shows both"
            )

    Attempt(compare).agree(comm)
    return {
        "backend": "horovod",
        "stall_shutdown_s": int(os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]),
        "settings": HOROVOD_DEFAULTS
        | {k: v for k, v in sorted(os.environ.items()) if k.startswith("HOROVOD_")},
    }


def distribute_optimizer(
    optimizer: Any,
    comm: Communicator,
    compression: str = "none",
    log: AllreduceLog | None = None,
) -> Any:
    """Returns an optimizer of the same class and settings that first averages gradients over ranks.

    Since averaging comes first, clipping acts on the averaged gradients, and the overflow check of
    loss scaling, which is a conditional, contains no collective. With one allreduce per gradient,
    Horovod can overlap communication with back-propagation. An optimizer that accumulates the
    gradients of several passes averages only their mean.

    Args:
        optimizer: A built-in or custom ``keras.optimizers.Optimizer``, not yet built.
        comm: The ranks; with one, `optimizer` itself is returned.
        compression: How gradients are sent: "none" or "fp16" (candle_p1.distributed.compression).
        log: Records the allreduces.

    Raises:
        DistributedError: The optimizer has already been built; its state would be lost.
    """
    if comm.size == 1:
        return optimizer
    if optimizer.built:
        raise DistributedError(
            "an optimizer must be distributed before it is built, or its state would be lost"
        )
    plain = type(optimizer)

    class Distributed(plain):  # type: ignore[misc,valid-type]
        def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
            variables = (
                self._trainable_variables if trainable_variables is None else trainable_variables
            )
            if not self.gradient_accumulation_steps:
                grads = average_gradients(grads, variables, compression, log)
            super().apply(grads, trainable_variables)

        def _clip_gradients(self, grads: Sequence[Any]) -> Any:
            if self.gradient_accumulation_steps:  # Keras calls this with the mean of the passes
                grads = average_gradients(grads, self._trainable_variables, compression, log)
            return super()._clip_gradients(grads)

    Distributed.__name__ = f"Distributed{plain.__name__}"
    Distributed.__qualname__ = Distributed.__name__
    return Distributed.from_config(optimizer.get_config())


def average_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    compression: str = "none",
    log: AllreduceLog | None = None,
) -> list[Any]:
    """Returns the gradients averaged over ranks by Horovod; collective.

    Args:
        gradients: Tensors; sparse ones (tf.IndexedSlices) become dense; None stays None, and must
            be None on every rank.
        variables: The Keras variables of the gradients, in the same order.
        compression: See `distribute_optimizer`.
        log: See `distribute_optimizer`.
    """
    import tensorflow as tf

    hvd = _horovod()
    given = {
        f"gradient.{i}.{variable.path}": tf.convert_to_tensor(gradient)
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
        if gradient is not None
    }
    on_gpu = [
        _is_on_gpu(variable)
        for gradient, variable in zip(gradients, variables, strict=True)
        if gradient is not None
    ]
    ready = list(map(_clock, given.values(), on_gpu)) if log else []
    average, num_bytes = _COMPRESSED[compression]
    averaged = [average(hvd, gradient, name) for name, gradient in given.items()]
    if log:
        sizes = [num_bytes(gradient) for gradient in given.values()]
        log.write(
            ready,
            list(map(_clock, averaged, on_gpu)),
            dict(zip(given, sizes, strict=True)),
            on_gpu=any(on_gpu),
        )
    remaining = iter(averaged)
    return [None if gradient is None else next(remaining) for gradient in gradients]


def _average(hvd: Any, gradient: Any, name: str) -> Any:
    return hvd.allreduce(gradient, op=hvd.Average, name=name)


def _average_as_half(hvd: Any, gradient: Any, name: str) -> Any:
    return average_as_half(
        gradient,
        hvd.size(),
        lambda largest: hvd.allreduce(largest, op=hvd.Max, name=f"largest.{name}"),
        lambda values: hvd.allreduce(values, op=hvd.Sum, name=name),
    )


_COMPRESSED: dict[str, tuple[Callable[..., Any], Callable[[Any], int]]] = {
    "none": (_average, lambda value: value.shape.num_elements() * value.dtype.size),
    "fp16": (_average_as_half, lambda value: value.shape.num_elements() * 2 + LARGEST_BYTES),
}
"""How a gradient is averaged, and how many bytes of it a rank sends, by compression."""
COMPRESSIONS = tuple(_COMPRESSED)


def broadcast_state(model: Any, comm: Communicator, root: int = 0) -> None:
    """Copies the root's weights and optimizer state to every rank; collective, before training.

    The optimizer must be built. The recorded time is that of the broadcast alone, without
    TensorFlow's preparation; of variables on a GPU, the host gets one element, to see when they
    have arrived. Random states (of dropout, for example) are not copied, so ranks draw different
    numbers.
    """
    if comm.size == 1:
        return
    import tensorflow as tf

    hvd = _horovod()
    state = [*model.weights, *model.optimizer.variables]
    variables = [variable.value for variable in state]
    on_gpu = list(map(_is_on_gpu, state))

    @tf.function  # type: ignore[untyped-decorator]
    def copy() -> tuple[Any, Any]:
        given = [tf.convert_to_tensor(variable) for variable in variables]
        begins = list(map(_clock, given, on_gpu))
        received = [
            hvd.broadcast(value, root_rank=root, name=f"state.{i}") for i, value in enumerate(given)
        ]
        ends = list(map(_clock, received, on_gpu))
        for variable, value in zip(variables, received, strict=True):
            variable.assign(value)
        return tf.reduce_min(begins), tf.reduce_max(ends)

    begin, end = copy()
    num_bytes = sum(value.shape.num_elements() * value.dtype.size for value in variables)
    note_collective("horovod", "broadcast", num_bytes * (comm.rank == root), float(end - begin))


def _is_on_gpu(variable: Any) -> bool:
    """Returns whether a Keras variable, and thereby its gradient, is on a GPU."""
    return "GPU" in str(variable.value.device)


def _clock(tensor: Any, on_gpu: bool) -> Any:
    return read_clock(tensor, on_gpu=on_gpu)


def seed_ranks(model: Any, seed: int, rank: int, *position: int) -> None:
    """Derives the state of every random layer (dropout, noise) from seed, rank and layer.

    At a restart with other ranks, the position in the training makes it a new one.
    """
    for i, state in enumerate(seed_states(model)):
        derived = np.random.SeedSequence(seed, spawn_key=(rank, i, *position)).generate_state(2)
        state.assign(derived.astype(state.dtype))


def seed_states(model: Any) -> list[Any]:
    """Returns the states of the random layers, which differ between ranks: Keras variables."""
    return [v for v in model.variables if v.path.endswith("seed_generator_state")]


def reduce_metrics(model: Any, comm: Communicator) -> dict[str, float]:
    """Returns the model's metrics over the samples of all ranks; collective.

    The state of a Keras metric consists of sums (of values and of weights, or of counts), so adding
    up the ranks' states gives the state over all samples, with the right weights for shares of
    unequal size. The metrics of `model` take on that state. Ranks without samples must call too.
    """
    if comm.size == 1:
        return _results(model)
    variables = [variable for metric in model.metrics for variable in metric.variables]
    has_seen = any(np.any(variable.numpy()) for variable in variables)
    # A rank that has never seen a sample has not built its metrics: it adds zeros, whose number it
    # learns here, and needs the result of another, the last that has seen one.
    num = sum(int(np.prod(variable.shape)) for variable in variables) if has_seen else 0
    num, last = map(int, comm.allreduce_max(np.array([num, comm.rank if has_seen else -1])))
    if last < 0:
        return {}
    mine = np.zeros(num)
    if has_seen:
        np.concatenate([variable.numpy().ravel() for variable in variables], out=mine)
    total = comm.allreduce_sum(mine)
    if has_seen:
        ends = np.cumsum([int(np.prod(variable.shape)) for variable in variables])
        for variable, state in zip(variables, np.split(total, ends[:-1]), strict=True):
            variable.assign(state.reshape(variable.shape))
    return comm.broadcast(_results(model) if has_seen else {}, root=last)


def _results(model: Any) -> dict[str, float]:
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def self_test_averaging(
    make_optimizer: Callable[[], Any], plain_optimizer: Callable[[], Any], comm: Communicator
) -> None:
    """Tests, by training a small linear model, that gradients are averaged; collective.

    Each rank trains for a few steps on its own samples, through ``compile`` and ``train_on_batch``
    as the real model will. All replicas must end up bit-identical, and with the weights that one
    process gets when it trains with the plain optimizer on the samples of all ranks together.

    Args:
        make_optimizer: Makes the optimizer to be tested.
        plain_optimizer: Makes the same optimizer without distribution.
        comm: The ranks; with one there is nothing to test.

    Raises:
        DistributedError: They are not averaged; the same on every rank.
    """
    if comm.size == 1:
        return
    generator = np.random.default_rng(20190805)  # the same on every rank
    num_samples, num_features = 4, 3
    x = generator.normal(size=(comm.size, num_samples, num_features)).astype("float32")
    y = generator.normal(size=(comm.size, num_samples, 1)).astype("float32")

    def trained(optimizer: Any, x: Any, y: Any) -> Any:
        import keras

        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="float32")
        model = keras.Sequential([keras.layers.Input((num_features,)), layer])
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False, auto_scale_loss=False)
        for _ in range(2 * (optimizer.gradient_accumulation_steps or 1)):
            model.train_on_batch(x, y)
        return layer.kernel.numpy()

    mine = trained(make_optimizer(), x[comm.rank], y[comm.rank])
    reference = trained(plain_optimizer(), np.concatenate(list(x)), np.concatenate(list(y)))
    advice = (
        "use candle_p1.distributed.horovod.distribute_optimizer (under Keras 3 Horovod's own"
        " DistributedOptimizer does not average)"
    )
    problem = None
    if comm.find_different(mine.tobytes()):
        problem = "their weights differ after the same steps"
    elif not np.allclose(mine, reference, rtol=1e-4, atol=1e-6):
        problem = "their weights are not those of one process with all samples"
    if comm.any(problem is not None):
        raise DistributedError(
            f"gradients are not averaged over the {comm.size} ranks"
            f" ({problem or 'as another rank reports'}): {advice}"
        ).on_all_ranks()


def _horovod() -> Any:
    import keras

    if keras.backend.backend() != "tensorflow":
        raise SetupError(
            f"more than one rank needs TensorFlow; KERAS_BACKEND is {keras.backend.backend()}"
        )
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # of any type, if Horovod was built for another TensorFlow
        raise SetupError(
            f"more than one rank needs Horovod, which cannot be imported: {error}. Install"
            " candle-p1[cpu] or candle-p1[gpu]"
        ) from error
    if not hvd.mpi_built():
        raise SetupError("Horovod was built without MPI: rebuild it with HOROVOD_WITH_MPI=1")
    return hvd
