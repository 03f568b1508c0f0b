"""The steps of training and of validation, one by one or as blocks that are one compiled program.

With JAX, the samples are on the device if they fit there. A block is then a loop around Keras's own
training step, which takes each batch by its indices. The number of steps is an argument of the
program, so that blocks of all sizes compute the same, bit for bit. Else each step is given a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from candle_p1.data.batches import EvaluationBatches, TrainBatches
from candle_p1.distributed.comm import Communicator
from candle_p1.models.fast.batches import stream
from candle_p1.models.fast.device_data import DeviceData

JAX_STATE = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)
"""The parts of the state that a step takes and returns with JAX, in order."""
BLOCK_S = 0.5
"""How long a block takes at most: so long signals, clocks and the screen may have to wait."""


class Steps:
    """Trains the steps of epochs, in order, on batches that the host makes: those of `stream`."""

    def __init__(self, model: Any, batches: Iterator[Any] | None = None) -> None:
        self._model, self._stream = model, batches
        self._state: Any = None
        model._jax_state_synced = True
        if batches is not None:
            model.make_train_function()

    def most(self, step: int) -> int:
        """Returns how many steps of an epoch, from this one on, can be trained at once."""
        return 1

    def train(self, epoch: int, step: int, num: int) -> Any:
        """Trains `num` steps of an epoch, from this one on; returns the metrics so far.

        With JAX, the state stays outside the model between steps; see
        `candle_p1.training.state.attach_state`.
        """
        function = self._model.train_function
        if keras.backend.backend() == "jax":
            return self._advance(function, self._stream)
        return function(self._stream)

    def _advance(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of JAX's state, which it returns with the metrics."""
        model = self._model
        if model._jax_state_synced:  # it has been attached to the model, and maybe changed
            wanted = dict.fromkeys(JAX_STATE, True)
            self._state = model._get_jax_state(**wanted, purge_model_variables=True)
            model._jax_state_synced = False
        logs, self._state = function(self._state, *arguments)
        model._jax_state = dict(zip(JAX_STATE, self._state, strict=True))
        return logs


class DeviceSteps(Steps):
    """Trains on batches that JAX takes from the device, where it has the order of each epoch."""

    def __init__(self, model: Any, data: DeviceData, batches: TrainBatches) -> None:
        import jax

        super().__init__(model)
        self._batches = batches
        self._across = getattr(model, "across_ranks", lambda tree: tree)
        self._arrays = self._across(data.arrays)
        self._epoch: int | None = None
        self._num_full = len(batches.order_of(epoch=0)) // batches.batch_size
        step = jax.jit(model.train_step)  # so that it is traced once

        def block(state: Any, arrays: Any, order: Any, bounds: Any) -> Any:
            def one(number: Any, state: Any) -> Any:
                return step(state, data.take(arrays, order[number]))

            logs, _ = jax.eval_shape(one, bounds[0], state)
            zeros = jax.tree.map(lambda each: jax.numpy.zeros(each.shape, each.dtype), logs)
            return jax.lax.fori_loop(
                bounds[0], bounds[1], lambda number, last: one(number, last[1]), (zeros, state)
            )

        compiled = getattr(model, "compile_over_ranks", None)
        self._block = compiled(block) if compiled else jax.jit(block, donate_argnums=0)

    def most(self, step: int) -> int:
        """Returns the steps to the epoch's end; a smaller batch there is a block by itself."""
        return self._num_full - step if step < self._num_full else 1

    def train(self, epoch: int, step: int, num: int) -> Any:
        """Trains a block, which is one call of the compiled program."""
        import jax

        if epoch != self._epoch:
            self._epoch, self._orders = epoch, self._put_orders(epoch)
        is_rest = step >= self._num_full
        order, first = self._orders[is_rest], 0 if is_rest else step
        bounds = self._across(jax.device_put(np.array([first, first + num], np.int32)))
        return self._advance(self._block, self._arrays, order, bounds)

    def _put_orders(self, epoch: int) -> list[Any]:
        """Returns the samples of all full batches, int32, shape (steps, batch), and of the rest."""
        import jax

        order, size = self._batches.order_of(epoch=epoch).astype(np.int32), self._batches.batch_size
        end = self._num_full * size
        parts = order[:end].reshape(self._num_full, size), order[np.newaxis, end:]
        return [self._across(jax.device_put(part)) for part in parts]


def make_steps(
    model: Any, batches: TrainBatches, data: DeviceData | None, epochs: range, first_step: int = 0
) -> Steps:
    """Returns what trains some epochs, counted from 0, of which the first begins with `first_step`.

    If the samples of the batches are not on the device, batches are streamed.
    """
    if data is None:
        return Steps(model, stream(batches, epochs, first_step))
    return DeviceSteps(model, data, batches)


class Pace:
    """How many steps the next block has: as many as take BLOCK_S, by the clock of rank 0.

    The first block has one step, in which the framework compiles; then they grow.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.num_steps, self.largest = comm, 1, 1

    def wait(self, num: int, begin_s: float, logs: Any) -> None:
        """Waits for a block of steps that returns `logs`, and sets the next one's size; collective.

        `begin_s` is when it began, by time.perf_counter.
        """
        import jax

        jax.block_until_ready(logs)
        step_s = (time.perf_counter() - begin_s) / num
        wanted = min(max(1, int(BLOCK_S / step_s)), 2 * self.num_steps)
        self.largest = max(self.largest, num)
        self.num_steps = self._comm.broadcast(wanted)


def evaluation_on_device(
    model: Any, data: DeviceData, batches: EvaluationBatches
) -> Callable[[], None]:
    """Returns a function that updates the metrics of a model with a rank's share of the samples."""
    import jax

    names = JAX_STATE[:2] + JAX_STATE[3:]
    (start, stop), size = batches.bounds, batches.batch_size
    num_full, rest = divmod(stop - start, size)
    step = jax.jit(model.test_step)

    def share(state: Any, arrays: Any, first: Any, num: Any, size: int) -> Any:
        def one(number: Any, state: Any) -> Any:
            which = first + number * size + jax.numpy.arange(size, dtype="int32")
            return step(state, data.take(arrays, which))[1]

        return jax.lax.fori_loop(0, num, one, state)

    compiled = jax.jit(share, static_argnames="size")

    def evaluate() -> None:
        state = model._get_jax_state(**dict.fromkeys(names, True))
        for first, num, each in ((start, num_full, size), (start + num_full * size, 1, rest)):
            if num and each:
                bounds = jax.device_put((np.int32(first), np.int32(num)))
                state = compiled(state, data.arrays, *bounds, size=each)
        model._jax_state = dict(zip(names, state, strict=True))
        model._jax_state_synced = False
        model.jax_state_sync()

    return evaluate


def python_logs(logs: Any) -> dict[str, Any]:
    """Returns metrics as Keras gives them to callbacks: sorted, flat, and Python's numbers."""
    found: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        if isinstance(value, dict):
            found.update(python_logs(value))
            continue
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            found[name] = value
    return found
