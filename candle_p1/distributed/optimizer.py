"""The way of the gradients: an optimizer that averages them over the ranks before it uses them.

Horovod's own ``hvd.DistributedOptimizer`` overrides a method that Keras 3 never calls, and averages
nothing. Every Keras 3 optimizer goes through ``apply(gradients, variables)``, so gradients are
averaged there, by the reducer of the engine, and a test before training proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from candle_p1.distributed.allreduce_log import AllreduceLog
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.engine import SERIAL, Engine
from candle_p1.distributed.reducers.reducer import Reducer
from candle_p1.distributed.reducers.shared_memory import SharedMemoryReducer
from candle_p1.errors import DistributedError
from candle_p1.ops.updates import Factors, FusedOptimizer, standing_for


def distribute_optimizer(optimizer: Any, reducer: Reducer, log: AllreduceLog | None = None) -> Any:
    """Returns an optimizer of the same class and settings that first averages gradients.

    Since averaging comes first, clipping acts on the averaged gradients, and the overflow check of
    loss scaling, which is a conditional, contains no collective. With one allreduce per gradient,
    communication can overlap with back-propagation. An optimizer that accumulates the gradients of
    several passes averages only their mean. Where nothing happens to the averages before the
    update, a reducer in shared memory does both at once.

    Raises:
        DistributedError: The optimizer has already been built; its state would be lost.
    """
    if reducer.comm.size == 1:
        return optimizer
    if optimizer.built:
        raise DistributedError(
            "an optimizer must be distributed before it is built, or its state would be lost"
        )
    import keras
    from keras.optimizers import LossScaleOptimizer

    plain = type(optimizer)
    updated: list[Any] = []  # not an attribute, which Keras would track

    class Distributed(plain):  # type: ignore[misc,valid-type]
        _fuses = False

        def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
            self._fuses = self.built and can_fuse(self, reducer)
            if not (self._fuses or self.gradient_accumulation_steps):
                grads = self._average(grads, trainable_variables)
            super().apply(grads, trainable_variables)

        def stateless_apply(
            self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
        ) -> Any:
            if isinstance(self, LossScaleOptimizer):  # the only one that does not call apply
                grads = self._average(grads)
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)

        def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
            updated[:] = trainable_variables  # those that have gradients
            super()._backend_apply_gradients(grads, trainable_variables)

        def _clip_gradients(self, grads: Sequence[Any]) -> Any:
            passes = self.gradient_accumulation_steps
            if passes:  # Keras calls this with their mean; with JAX in every pass, to no effect
                if keras.backend.backend() == "jax":
                    is_last = (self._iterations + 1) % passes == 0
                    grads = keras.ops.cond(
                        is_last, lambda: self._average(grads, updated), lambda: list(grads)
                    )
                else:
                    grads = self._average(grads, updated)
            return super()._clip_gradients(grads)

        def _average(self, grads: Sequence[Any], variables: Any = None) -> list[Any]:
            variables = self._trainable_variables if variables is None else variables
            return average_gradients(reducer, grads, variables, log)

        def _backend_update_step(
            self, grads: Sequence[Any], trainable_variables: Any, learning_rate: Any
        ) -> None:
            if not self._fuses:
                super()._backend_update_step(grads, trainable_variables, learning_rate)
                return
            assert isinstance(reducer, SharedMemoryReducer)
            named, ready = _named(reducer, grads, trainable_variables, log)
            step = self.fused_update(trainable_variables, learning_rate)
            apart_s = reducer.fused_update(step, trainable_variables, named, ready)
            if log:
                log.note_done([apart_s] * len(named), apart_s)

    Distributed.__name__ = Distributed.__qualname__ = f"Distributed{plain.__name__}"
    return Distributed.from_config(optimizer.get_config())


def can_fuse(optimizer: Any, reducer: Reducer) -> bool:
    """Returns whether averaging and updating are one operation: in memory, of a plain step."""
    can = isinstance(reducer, SharedMemoryReducer) and isinstance(optimizer, FusedOptimizer)
    return can and optimizer.is_fused()


def average_gradients(
    reducer: Reducer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    log: AllreduceLog | None = None,
) -> list[Any]:
    """Returns the gradients averaged over ranks; sparse ones (tf.IndexedSlices) become dense.

    None stays None, and must be None on every rank. The Keras variables are in the same order.
    """
    named, ready = _named(reducer, gradients, variables, log)
    averages = reducer.average(named, ready)
    if log:
        log.note_done(averages)
    remaining = iter(averages)
    return [None if gradient is None else next(remaining) for gradient in gradients]


def _named(
    reducer: Reducer, gradients: Sequence[Any], variables: Sequence[Any], log: AllreduceLog | None
) -> tuple[dict[str, Any], list[Any]]:
    """Returns the gradients that are not missing, by names that all ranks use.

    Beside them, what has to be there before any rank waits for others. Factors remain factors.
    """
    pairs = [
        (f"gradient.{i}.{variable.path}", _dense(gradient), variable)
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
        if gradient is not None
    ]
    named = {name: gradient for name, gradient, _ in pairs}
    if log is None:
        return named, []
    sizes = {
        name: each.num_bytes if isinstance(each, Factors) else reducer.num_bytes(each)
        for name, each in named.items()
    }
    tensors = {name: standing_for(each) for name, each in named.items()}
    return named, log.note_ready(tensors, [variable for *_, variable in pairs], sizes)


def _dense(gradient: Any) -> Any:
    if not hasattr(gradient, "indices"):
        return gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def self_test(
    engine: Engine,
    plain_optimizer: Callable[[], Any],
    make_optimizer: Callable[[], Any] | None = None,
) -> None:
    """Tests, by training a small linear model, that gradients are averaged; collective.

    Each rank trains for a few steps on its own samples, through ``compile`` and ``train_on_batch``
    as the real model will. All replicas must end up bit-identical, and with the weights that one
    process gets when it trains with the plain optimizer on the samples of all ranks together. The
    optimizer to be tested is, by default, `distribute_optimizer` of a plain one.

    Raises:
        DistributedError: They are not averaged; the same on every rank.
    """
    comm = engine.comm
    if comm.size == 1:
        return
    tested = (make_optimizer or partial(distribute_optimizer, plain_optimizer(), engine.reducer))()
    generator = np.random.default_rng(20190805)  # the same on every rank
    x = generator.normal(size=(comm.size, 4, 3)).astype("float32")
    y = generator.normal(size=(comm.size, 4, 1)).astype("float32")
    alone = Engine(SERIAL, SerialCommunicator(), engine.backend)
    mine = _trained(engine, tested, x[comm.rank], y[comm.rank])
    expected = _trained(alone, plain_optimizer(), np.concatenate(list(x)), np.concatenate(list(y)))
    problem = None
    if comm.find_different(mine.tobytes()):
        problem = "their weights differ after the same steps"
    elif comm.any(not np.allclose(mine, expected, rtol=1e-4, atol=1e-6)):
        problem = "their weights are not those of one process with all samples"
    if problem:
        raise DistributedError(
            f"gradients are not averaged over the {comm.size} ranks ({problem}): use the optimizer"
            " of candle_p1.distributed.optimizer, and compile by the engine (under Keras 3"
            " Horovod's own DistributedOptimizer does not average)"
        ).on_all_ranks()


def _trained(engine: Engine, optimizer: Any, x: Any, y: Any) -> Any:
    """Returns the weights of a linear model after two updates."""
    import keras

    # Gradients are named after layers, and Keras's names depend on what else a rank has made.
    layer = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="ones", dtype="float32", name="layer"
    )
    model = keras.Sequential([keras.layers.Input(x.shape[1:]), layer], name="self_test")
    engine.compile(model, is_gpu=False, optimizer=optimizer, loss="mse")
    for _ in range(2 * (optimizer.gradient_accumulation_steps or 1)):
        model.train_on_batch(x, y)
    return keras.ops.convert_to_numpy(layer.kernel)
