"""What training does on all ranks together: validation, and Keras callbacks that communicate.

Every rank must use the same callbacks, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from candle_p1.distributed.comm import Communicator, on_first_rank
from candle_p1.distributed.replicas import check_equal
from candle_p1.scaling import ScalingPlan, warmup_learning_rate

TRACE_DIRECTORY = "step_trace"
FIRST_TRACED_STEP, LAST_TRACED_STEP = 2, 11
"""From 0 on; those before compile and allocate."""


def reduce_metrics(model: Any, comm: Communicator) -> dict[str, float]:
    """Gives the model its metrics over the samples of all ranks, and returns them; collective.

    Ranks without samples must call it, too.

    The state of a Keras metric consists of sums (of values and of weights, or of counts), so adding
    up the ranks' states gives the state over all samples, with the right weights for shares of
    unequal size.
    """
    if comm.size == 1:
        return _results(model)
    variables = [variable for metric in model.metrics for variable in metric.variables]
    states = [np.asarray(variable.numpy(), float) for variable in variables]
    mine = np.concatenate([np.zeros(0), *map(np.ravel, states)])
    has_seen = bool(mine.any())
    # A rank that has never seen a sample has not built its metrics: it adds zeros, whose number it
    # learns here, and needs the result of another, the last that has seen one.
    seen = [mine.size, comm.rank] if has_seen else [0, -1]
    num, last = map(int, comm.allreduce_max(np.array(seen)))
    if last < 0:
        return {}
    total = comm.allreduce_sum(mine if has_seen else np.zeros(num))
    if has_seen:
        ends = np.cumsum([state.size for state in states])
        for variable, summed in zip(variables, np.split(total, ends[:-1]), strict=True):
            variable.assign(summed.reshape(variable.shape))
    return comm.broadcast(_results(model) if has_seen else {}, root=last)


def _results(model: Any) -> dict[str, float]:
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def evaluate_shared(
    model: Any, batches: Any, comm: Communicator, evaluate: Callable[[], None] | None = None
) -> dict[str, float]:
    """Evaluates a model on the samples of all ranks together; collective.

    All ranks must have the same weights. The batches are this rank's share of the samples, and may
    be none. If `evaluate` is given, it updates the metrics of the model with all of them. Returns
    loss and metrics by name, as one process would compute them to float32 rounding.
    """
    model.reset_metrics()
    if evaluate is not None:
        evaluate()
    elif keras.backend.backend() == "tensorflow":
        # model.evaluate makes a tf.data.Dataset in every call, slower than a small share itself.
        if model.test_function is None:
            model.test_function = _make_test_function(model)
        for step in range(len(batches)):
            model.test_function(iter([batches[step]]))
    elif len(batches):
        model.evaluate(batches, verbose=0)
    return reduce_metrics(model, comm)


def _make_test_function(model: Any) -> Any:
    """Returns a step of evaluation that Keras can use too; it takes an iterator of batches.

    Keras's own is traced for batches of any size after the second size. Then it no longer knows how
    many samples a batch has, and counts it as one in the losses of several outputs.
    """
    import tensorflow as tf

    # AutoGraph would take longer to trace it, and Keras's own does without, too.
    xla = bool(model.jit_compile) or None
    step = tf.function(model.test_step, autograph=False, jit_compile=xla)
    return lambda batches: step(next(batches))


class LearningRateWarmup(keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate over the plan's warm-up epochs, at every "step" or "epoch"."""

    def __init__(self, plan: ScalingPlan, by: str = "step") -> None:
        super().__init__()
        self._plan = plan
        self._steps_between = plan.steps_per_epoch if by == "epoch" else 1

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Remembers the epoch, from which the number of the step follows."""
        self._first_step = epoch * self._plan.steps_per_epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Sets the learning rate, if it rises with this step."""
        step = self._first_step + batch
        is_warm = step > self._plan.warmup_epochs * self._plan.steps_per_epoch
        if not is_warm and step % self._steps_between == 0:
            self.model.optimizer.learning_rate = warmup_learning_rate(self._plan, step)

    def steps_until_seen(self, batch: int) -> int:
        """Returns after how many steps, from one of this epoch on, it must see one begin."""
        step = self._first_step + batch
        is_warm = step + 1 > self._plan.warmup_epochs * self._plan.steps_per_epoch
        per_epoch = self._plan.steps_per_epoch
        return per_epoch if is_warm else self._steps_between - step % self._steps_between


class ReplicaCheck(keras.callbacks.Callback):  # type: ignore[misc]
    """Compares the weights of all ranks, bit for bit; slow, for debugging.

    After steps it compares those that the optimizer updates; at the end of an epoch, after the
    validation, all.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Remembers the epoch for the error message."""
        self._epoch = f"epoch {epoch + 1}"

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Compares the trainable weights; collective."""
        when = f"step {batch + 1} of {self._epoch}"
        check_equal(self.model.trainable_weights, self._comm, when)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Compares all weights; collective."""
        check_equal(self.model.weights, self._comm, self._epoch)


class AfterEpoch(keras.callbacks.Callback):  # type: ignore[misc]
    """Asks after every epoch on rank 0 whether training ends, on all ranks.

    Args:
        function: Takes the number of the epoch, from 1, and its metrics over all ranks. It may be
            that of a program, which keeps a state of its own.
        comm: The ranks.

    Attributes:
        has_ended: Whether it has ended training.
    """

    def __init__(
        self, function: Callable[[int, Mapping[str, float]], bool], comm: Communicator
    ) -> None:
        super().__init__()
        self._function, self._comm = function, comm
        self.has_ended = False

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Calls the function on rank 0, and ends training everywhere if it says so; collective."""
        self.has_ended = on_first_rank(
            self._comm, lambda: bool(self._function(epoch + 1, dict(logs or {})))
        )
        self.model.stop_training = self.model.stop_training or self.has_ended


class TimeLimit(AfterEpoch):
    """Ends training after the epoch in which a time limit is reached by rank 0's clock."""

    def __init__(self, limit_s: float, comm: Communicator) -> None:
        super().__init__(lambda *_: time.perf_counter() - self._start > limit_s, comm)
        self._start = time.perf_counter()

    def checkpoint_state(self) -> dict[str, Any]:
        """Returns how much of the time is used."""
        return {"used_s": time.perf_counter() - self._start, "reached": self.has_ended}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Counts the time that earlier segments of the run have used."""
        self._start = time.perf_counter() - state["used_s"]
        self.has_ended = state["reached"]


class StepTracer(keras.callbacks.Callback):  # type: ignore[misc]
    """Traces ten steps of this rank, after the first two, or as many as there are.

    TensorBoard and XProf open the trace in the directory. Tracing slows the steps down.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._step = 0
        self._running = False
        if keras.backend.backend() == "jax":
            from jax import profiler

            self._start, self._stop = profiler.start_trace, profiler.stop_trace
        else:
            from tensorflow import profiler

            self._start, self._stop = profiler.experimental.start, profiler.experimental.stop

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Starts the trace before the first step to be traced, and ends it after the last."""
        if self._step == FIRST_TRACED_STEP:
            self._start(str(self._directory))
            self._running = True
        elif self._step == LAST_TRACED_STEP + 1:
            self.on_train_end()
        self._step += 1

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Ends the trace if training was shorter."""
        if self._running:
            self._running = False
            self._stop()
