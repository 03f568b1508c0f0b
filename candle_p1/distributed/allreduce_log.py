"""When gradients are ready to be averaged over the ranks, and when their averages are available.

The time of an allreduce in between includes waiting for its turn and for other ranks. What of it is
*exposed* is the time from the last gradient's being ready, which is the end of back-propagation, to
the last average's being available. Reading the clock takes a few microseconds per step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.distributed.comm import Communicator
from candle_p1.distributed.reducers import reducer
from candle_p1.instrument import phases
from candle_p1.instrument.collectives import CommunicationLog
from candle_p1.instrument.phases import length, union
from candle_p1.ops import read_clock
from candle_p1.records.types import ClockWaitsFor

CAPACITY = 256
"""The number of steps that are kept before they are read."""
FIRST, READY, DONE = range(3)
"""The moments of a step that XLA compiles."""


class AllreduceLog(ABC):
    """The allreduces of one model's gradients on one rank, added up in a log of communication."""

    waits_for: ClockWaitsFor | None = None
    """What the clock waits for, once the step has been made: "element" on a GPU and with JAX."""

    def __init__(self, log: CommunicationLog, library: str) -> None:
        self._log, self._library = log, library
        self._num_unread = 0
        self._exposed_s = self._allreduce_s = 0.0

    def count_steps(self, num: int) -> None:
        """Counts steps that begin, one at a time if there is a table, which must not overflow."""
        self._num_unread += num
        if self._num_unread > CAPACITY:
            self._read()

    def take(self) -> tuple[float, float]:
        """Returns times of the steps since the last call, in s, as they overlap with computing.

        In the first a step only waited for allreduces; in the second any was in progress.
        """
        self._read()
        taken = self._exposed_s, self._allreduce_s
        self._exposed_s = self._allreduce_s = 0.0
        return taken

    @abstractmethod
    def note_ready(
        self, gradients: Mapping[str, Any], variables: Sequence[Any], sizes: Mapping[str, int]
    ) -> list[Any]:
        """Notes when gradients are ready to be averaged; part of a training step.

        The gradients are dense, in the order of the layers; `sizes` are the bytes of each that a
        rank sends. Returns tensors that must be there before a rank waits for others, or the times
        would be wrong.
        """

    @abstractmethod
    def note_done(self, averages: Sequence[Any], apart_s: Any = None) -> None:
        """Notes when the averages of these gradients are available; part of the same step.

        With `apart_s`, in s, they were available so long ago, before the update that uses them.
        """

    @abstractmethod
    def _take_rows(self) -> tuple[Mapping[str, int], NDArray[np.float64]]:
        """Returns what the steps since the last call have exchanged.

        These are the bytes that this rank has sent in every step, by the name of what was
        exchanged; and its moments, in s, shape (steps, 2 or 3, names): when it was first ready,
        when all of it was, if that is another moment, and when its average was available.
        """

    def _read(self) -> None:
        sizes, rows = self._take_rows()
        self._num_unread = 0
        if not len(rows):
            return
        seconds = (rows[:, -1] - rows[:, 0]).sum(axis=0)
        for (name, num_bytes), total_s in zip(sizes.items(), seconds, strict=True):
            self._log.add(self._library, f"allreduce {name}", num_bytes, float(total_s), len(rows))
        ready, done = rows[:, -2].max(axis=1), rows[:, -1].max(axis=1)
        exposed_s = float(np.maximum(done - ready, 0).sum())
        phases.add_communication(exposed_s)
        self._exposed_s += exposed_s
        intervals = rows[:, [0, -1]].transpose(0, 2, 1).reshape(-1, 2)
        self._allreduce_s += length(union(intervals))


class GraphLog(AllreduceLog):
    """The allreduces of a graph of TensorFlow, which reads the clock itself.

    The graph writes one row per step into a table. On a GPU, the clock is read when one element of
    the tensor has arrived on the host: when the GPU has computed the tensor, and the time of that
    copy later.
    """

    _table: Any = None
    _num_read = 0

    def note_ready(
        self, gradients: Mapping[str, Any], variables: Sequence[Any], sizes: Mapping[str, int]
    ) -> list[Any]:
        self._sizes = sizes
        self._on_gpu = list(map(reducer.is_on_gpu, variables))
        self.waits_for = "element" if any(self._on_gpu) else "tensor"
        self._ready = self._clocks(gradients.values())
        return self._ready

    def note_done(self, averages: Sequence[Any], apart_s: Any = None) -> None:
        import tensorflow as tf

        if apart_s is None:
            done = self._clocks(averages)
        else:  # all at once
            done = [read_clock(apart_s, on_gpu=False) - apart_s] * len(averages)
        with tf.device("CPU:0"):
            if self._table is None:
                with tf.init_scope():  # outside the graph
                    zeros = tf.zeros((CAPACITY, 2, len(done)), tf.float64)
                    self._table = tf.Variable(zeros, trainable=False)
                    self._num_steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            step = self._num_steps.assign_add(1) - 1
            self._table[step % CAPACITY].assign(tf.stack([tf.stack(self._ready), tf.stack(done)]))

    def _clocks(self, tensors: Iterable[Any]) -> list[Any]:
        return [
            read_clock(tensor, on_gpu=on_gpu)
            for tensor, on_gpu in zip(tensors, self._on_gpu, strict=True)
        ]

    def _take_rows(self) -> tuple[Mapping[str, int], NDArray[np.float64]]:
        if self._table is None:
            return {}, np.empty((0, 2, 0))
        num_steps = int(self._num_steps.numpy())
        first = max(self._num_read, num_steps - CAPACITY)
        rows = self._table.numpy()[np.arange(first, num_steps) % CAPACITY]
        self._num_read = num_steps
        return self._sizes, rows


class HostLog(AllreduceLog):
    """The allreduces of a step that XLA compiles, which calls the host to read the clock.

    It does so with one element of each gradient: when the first gradient is ready, which is that of
    the last layer; when all are, which is the end of back-propagation; and when all averages are
    available. XLA may exchange several gradients at once, so they are one entry of the log.
    """

    _num_bytes = 0

    def __init__(self, log: CommunicationLog, library: str) -> None:
        super().__init__(log, library)
        self._times: tuple[list[float], ...] = ([], [], [])

    def note_ready(
        self, gradients: Mapping[str, Any], variables: Sequence[Any], sizes: Mapping[str, int]
    ) -> list[Any]:
        self._num_bytes, self.waits_for = sum(sizes.values()), "element"
        self._note(FIRST, list(gradients.values())[-1:])
        self._note(READY, gradients.values())
        return []

    def note_done(self, averages: Sequence[Any], apart_s: Any = None) -> None:
        self._note(DONE, averages)

    def _note(self, moment: int, values: Iterable[Any]) -> None:
        import jax

        times = self._times[moment]
        jax.debug.callback(
            lambda *elements: times.append(time.perf_counter()),
            *(value.reshape(-1)[0] for value in values),
        )

    def _take_rows(self) -> tuple[Mapping[str, int], NDArray[np.float64]]:
        import jax

        jax.effects_barrier()  # waits for the steps
        rows = np.array(self._times).T[:, :, np.newaxis]
        for times in self._times:
            times.clear()
        return {"gradients": self._num_bytes}, rows


def allreduce_times(
    log: AllreduceLog | None, comm: Communicator
) -> Callable[[], tuple[float | None, float | None]]:
    """Returns `AllreduceLog.take`; without a log, a function that returns 0 or None for both."""
    nothing = 0.0 if comm.size == 1 else None
    return log.take if log is not None else lambda: (nothing, nothing)


def unknown_efficiency(
    log: AllreduceLog | None, comm: Communicator, engine: str, *, is_wanted: bool
) -> dict[str, Any]:
    """Returns the record's section "efficiency" if there is no log, though it may be wanted."""
    if log is not None or comm.size == 1:
        return {}
    reason = "gradient allreduces are not logged with --communication_log False"
    if is_wanted:
        reason = (
            f"the engine {engine} does not time gradient allreduces here: on GPUs that would delay"
            " them, and older releases of its framework tell wrong times"
        )
    return {"efficiency": {"kind": "absent", "reason": reason}}
