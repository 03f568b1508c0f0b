"""Keras callbacks that communicate. Every rank must use the same ones, in the same order.

The order matters: EpochMetrics and SharedValidation write into the logs that later callbacks
(history, CSV) read.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from candle_p1.distributed.metrics import reduce_metrics
from candle_p1.errors import DistributedError
from candle_p1.scaling import warmup_learning_rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from candle_p1.distributed.comm import Communicator
    from candle_p1.scaling import ScalingPlan


def evaluate_shared(model: Any, batches: Any, comm: Communicator) -> dict[str, float]:
    """Evaluates a model on the samples of all ranks together; collective.

    Args:
        model: A compiled model with the same weights on every rank.
        batches: This rank's share of the samples, in batches; may be empty.
        comm: The ranks.

    Returns:
        Loss and metrics by name, as one process would compute them to float32 rounding.
    """
    model.reset_metrics()
    if keras.backend.backend() != "tensorflow":
        if len(batches):
            model.evaluate(batches, verbose=0)
    else:
        # model.evaluate makes a tf.data.Dataset in every call, slower than a small share itself.
        if model.test_function is None:
            model.test_function = _make_test_function(model)
        for step in range(len(batches)):
            model.test_function(iter([batches[step]]))
    return reduce_metrics(model, comm)


def _make_test_function(model: Any) -> Any:
    """Returns a step of evaluation that Keras can use too; it takes an iterator of batches.

    Keras's own is traced for batches of any size after the second size. Then it no longer knows how
    many samples a batch has, and counts it as one in the losses of several outputs. Like Keras's
    own, it is traced as it is written, without being translated by AutoGraph, which takes longer.
    """
    import tensorflow as tf

    step = tf.function(
        model.test_step, autograph=False, jit_compile=bool(model.jit_compile) or None
    )
    return lambda batches: step(next(batches))


def average_state(model: Any, comm: Communicator) -> dict[str, Any]:
    """Sets what no gradient updates, as the moving statistics of batches, to its mean over ranks.

    All ranks have trained on as many samples, so they weigh the same. Integers become rank 0's. The
    states of random layers are no weights, and stay each rank's own. Collective.

    Returns what this rank had instead, by name, for `restore_state`.
    """
    replaced = {}
    for i, variable in enumerate(model.non_trainable_weights if comm.size > 1 else ()):
        mine = np.array(keras.ops.convert_to_numpy(variable.value))
        if keras.backend.is_float_dtype(variable.dtype):
            total = comm.allreduce_sum(mine.astype(np.float64))
            shared = (total / comm.size).astype(mine.dtype)
        else:
            shared = comm.broadcast(mine)
        if not np.array_equal(mine, shared):
            replaced[f"layer/{i}"] = mine
            variable.assign(shared)
    return replaced


def restore_state(model: Any, replaced: Mapping[str, Any]) -> None:
    """Puts back what `average_state` has replaced on this rank; ignores other names."""
    for i, variable in enumerate(model.non_trainable_weights):
        if (name := f"layer/{i}") in replaced:
            variable.assign(replaced[name])


class EpochMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Puts training metrics over the samples of all ranks, and the learning rate, into the logs."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Replaces this rank's metrics by those over all ranks; collective."""
        assert logs is not None
        if self._comm.size > 1:
            logs.update(reduce_metrics(self.model, self._comm))
        logs["learning_rate"] = float(self.model.optimizer.learning_rate)


class SharedValidation(keras.callbacks.Callback):  # type: ignore[misc]
    """Validates after every epoch, each rank on its share, and puts the metrics into the logs.

    It first averages the state of layers, so from then until the next epoch all replicas are equal.

    Attributes:
        seconds: How long each validation took on this rank.
    """

    def __init__(self, batches: Any, comm: Communicator) -> None:
        super().__init__()
        self._batches, self._comm = batches, comm
        self.seconds: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Averages the state of layers and validates; collective."""
        assert logs is not None
        average_state(self.model, self._comm)
        start = time.perf_counter()
        metrics = evaluate_shared(self.model, self._batches, self._comm)
        self.seconds.append(time.perf_counter() - start)
        logs.update({f"val_{name}": value for name, value in metrics.items()})


class LearningRateWarmup(keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate over the plan's warm-up epochs, at every "step" or "epoch"."""

    def __init__(self, plan: ScalingPlan, by: str = "step") -> None:
        super().__init__()
        self._plan = plan
        self._epoch = 0
        self._steps_between = plan.steps_per_epoch if by == "epoch" else 1

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Remembers the epoch, from which the number of the step follows."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Sets the learning rate, if it rises with this step."""
        step = self._epoch * self._plan.steps_per_epoch + batch
        is_warm = step > self._plan.warmup_epochs * self._plan.steps_per_epoch
        if not is_warm and step % self._steps_between == 0:
            self.model.optimizer.learning_rate = warmup_learning_rate(self._plan, step)


class ReplicaCheck(keras.callbacks.Callback):  # type: ignore[misc]
    """Compares the weights of all ranks, bit for bit; slow, for debugging.

    After steps it compares those that the optimizer updates; at the end of an epoch, after
    SharedValidation, all.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Remembers the epoch for the error message."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Compares the trainable weights; collective."""
        self._compare(self.model.trainable_weights, f"step {batch + 1} of epoch {self._epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Compares all weights; collective."""
        self._compare(self.model.weights, f"epoch {epoch + 1}")

    def _compare(self, weights: Any, when: str) -> None:
        """Raises DistributedError, on every rank, if the weights of ranks differ."""
        digest = hashlib.sha256()
        for weight in weights:
            digest.update(keras.ops.convert_to_numpy(weight.value).tobytes())
        different = self._comm.find_different(digest.hexdigest())
        if different:
            raise DistributedError(
                f"replicas differ after {when}: ranks"
                f" {', '.join(map(str, different))} have weights that differ from rank 0's"
            ).on_all_ranks()


class TimeLimit(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends training, on all ranks, after the epoch in which a time limit is reached.

    Attributes:
        reached: Whether it has been reached.
    """

    def __init__(self, limit_s: float, comm: Communicator) -> None:
        super().__init__()
        self._limit_s, self._comm = limit_s, comm
        self._start = time.perf_counter()
        self.reached = False

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Stops training if the limit is reached by rank 0's clock; collective."""
        self.reached = self._comm.broadcast(time.perf_counter() - self._start > self._limit_s)
        self.model.stop_training = self.model.stop_training or self.reached

    def checkpoint_state(self) -> dict[str, Any]:
        """Returns how much of the time is used."""
        return {"used_s": time.perf_counter() - self._start, "reached": self.reached}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Counts the time that earlier parts of the run have used."""
        self._start = time.perf_counter() - state["used_s"]
        self.reached = state["reached"]
