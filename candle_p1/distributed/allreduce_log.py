"""When each gradient is passed to Horovod, and when its average over the ranks is available.

The graph reads the clock twice per gradient and writes one row per step into a table, so logging
takes a few microseconds per step and waits for nothing. On a GPU, the clock is read when one
element of the tensor has arrived on the host: when the GPU has computed the tensor, and the time of
that copy later. The table gives

- the time of each allreduce, from the gradient being ready to the average being available; this
  includes waiting for its turn and for other ranks;
- the *exposed* communication of each step: from the last gradient being ready, which is the end of
  back-propagation, to the last average being available. Back-propagation hides the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.instrument import phases
from candle_p1.ops import read_clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from candle_p1.distributed.comm import Communicator
    from candle_p1.instrument.collectives import CommunicationLog
    from candle_p1.parameters.parameter_set import ParameterSet
    from candle_p1.records.types import ClockWaitsFor

CAPACITY = 256
"""The number of steps that the table holds."""
NOT_LOGGED = "gradient allreduces are not logged with --communication_log False"


class AllreduceLog:
    """The allreduces of one model's gradients, as seen by one rank.

    Args:
        log: Where the allreduces are added up.

    Attributes:
        waits_for: What the clock waits for: "tensor", or "element" on a GPU; None before the graph
            has been made.
    """

    def __init__(self, log: CommunicationLog) -> None:
        self._log = log
        self._sizes: dict[str, int] = {}
        self._num_read = self._num_unread = 0
        self._exposed_s = self._allreduce_s = 0.0
        self._table: Any = None
        self.waits_for: ClockWaitsFor | None = None

    def write(
        self, ready: list[Any], done: list[Any], sizes: dict[str, int], *, on_gpu: bool = False
    ) -> None:
        """Writes the times of one step into the table; part of the graph.

        Args:
            ready: The time at which each gradient was ready.
            done: The time at which each average was available.
            sizes: The number of bytes sent for each gradient, by name.
            on_gpu: Whether gradients are on a GPU.
        """
        import tensorflow as tf

        self._sizes = sizes
        self.waits_for = "element" if on_gpu else "tensor"
        with tf.device("CPU:0"):
            if self._table is None:
                with tf.init_scope():  # outside the graph
                    zeros = tf.zeros((CAPACITY, 2, len(sizes)), tf.float64)
                    self._table = tf.Variable(zeros, trainable=False)
                    self._num_steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            step = self._num_steps.assign_add(1) - 1
            self._table[step % CAPACITY].assign(tf.stack([tf.stack(ready), tf.stack(done)]))

    def example(self, num_gradients: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Returns two functions: a graph that does nothing but log, and one that does nothing.

        Their difference in time is what logging adds to a step with this number of gradients.
        """
        import tensorflow as tf

        value = tf.zeros(())
        sizes = {str(number): value.dtype.size for number in range(num_gradients)}

        @tf.function  # type: ignore[untyped-decorator]
        def logged(value: Any) -> Any:
            ready, done = ([read_clock(value) for _ in sizes] for _ in range(2))
            self.write(ready, done, sizes)
            return value

        @tf.function  # type: ignore[untyped-decorator]
        def bare(value: Any) -> Any:
            return value + 0

        return lambda: logged(value), lambda: bare(value)

    def count_step(self) -> None:
        """Counts a step that begins, and reads the table before it overflows."""
        self._num_unread += 1
        if self._num_unread > CAPACITY:
            self._read()

    def take(self) -> tuple[float, float]:
        """Returns the exposed time, and the time in which any allreduce was in progress, in s.

        Both cover the steps since the last call.
        """
        self._read()
        taken = self._exposed_s, self._allreduce_s
        self._exposed_s = self._allreduce_s = 0.0
        return taken

    def _read(self) -> None:
        """Reads the steps that the table holds and that have not been read yet."""
        if self._table is None:
            return
        num_steps = int(self._num_steps.numpy())
        first = max(self._num_read, num_steps - CAPACITY)
        rows = self._table.numpy()[np.arange(first, num_steps) % CAPACITY]
        self._num_read, self._num_unread = num_steps, 0
        seconds = (rows[:, 1] - rows[:, 0]).sum(axis=0)
        for (name, num_bytes), total_s in zip(self._sizes.items(), seconds, strict=True):
            self._log.add("horovod", f"allreduce {name}", num_bytes, float(total_s), len(rows))
        last_ready, last_done = rows[:, 0].max(axis=1), rows[:, 1].max(axis=1)
        exposed_s = float(np.maximum(last_done - last_ready, 0.0).sum())
        phases.add_communication(exposed_s)
        self._exposed_s += exposed_s
        self._allreduce_s += float(union_s(rows).sum())


def make_allreduce_log(
    log: CommunicationLog, params: ParameterSet, comm: Communicator
) -> AllreduceLog | None:
    """Returns a log of gradient allreduces; None if there are none or they are not to be logged."""
    if comm.size == 1 or not params["communication_log"]:
        return None
    return AllreduceLog(log)


def allreduce_times(
    log: AllreduceLog | None, comm: Communicator
) -> Callable[[], tuple[float | None, float | None]]:
    """Returns `AllreduceLog.take`; without a log, a function that returns 0 or None for both."""
    if log is not None:
        return log.take
    nothing = 0.0 if comm.size == 1 else None
    return lambda: (nothing, nothing)


def unknown_efficiency(log: AllreduceLog | None, comm: Communicator) -> dict[str, Any]:
    """Returns the record's section "efficiency" if allreduces were not logged, else nothing."""
    if log is None and comm.size > 1:
        return {"efficiency": {"kind": "absent", "reason": NOT_LOGGED}}
    return {}


def union_s(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the length of the union of the intervals in each row.

    Args:
        rows: The beginnings and ends, shape (rows, 2, intervals).
    """
    order = np.argsort(rows[:, 0], axis=1)
    begins = np.take_along_axis(rows[:, 0], order, axis=1)
    ends = np.take_along_axis(rows[:, 1], order, axis=1)
    covered_to = np.maximum.accumulate(ends, axis=1)
    before = np.concatenate([begins[:, :1], covered_to[:, :-1]], axis=1)
    covered = np.maximum(covered_to - np.maximum(begins, before), 0)
    return np.asarray(covered.sum(axis=1))
