"""When each gradient goes to Horovod, and when it is back as the average of all ranks.

Two readings of the clock stand in the graph for each gradient, and one row per step in a table, so
a step costs some microseconds and waits for nothing. What they tell:

- An allreduce takes from the time its gradient is ready to the time the average is there: waiting
  for its turn and for other ranks included.
- Of a step, the *exposed* communication is the time from the last gradient's being ready, which is
  the end of back-propagation, to the last average's being there. What came before, back-propagation
  has hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from candle_p1.instrument import phases
from candle_p1.ops import read_clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from candle_p1.instrument.collectives import CommunicationLog

CAPACITY = 256
"""Steps between two readings of the table."""


class GradientSteps(NamedTuple):
    """Some steps of this rank.

    Attributes:
        exposed: Begin and end of the exposed communication by time.perf_counter, in s; float64,
            shape (steps, 2).
        busy_s: The time of each step in which any allreduce was under way; shape (steps,).
    """

    exposed: NDArray[np.float64]
    busy_s: NDArray[np.float64]


class GradientLog:
    """The times of one model's gradients on one rank.

    Args:
        log: Is told of the allreduces.
    """

    def __init__(self, log: CommunicationLog) -> None:
        self._log = log
        self._sizes: dict[str, int] = {}
        self._num_read = self._num_unread = 0
        self._unread: list[GradientSteps] = []
        self._table: Any = None

    def write(self, ready: list[Any], done: list[Any], sizes: dict[str, int]) -> None:
        """Notes the times of one step; part of the graph.

        Args:
            ready: The time of each gradient.
            done: The time of each average.
            sizes: What the gradients are sent as, in bytes, by name.
        """
        import tensorflow as tf

        self._sizes = sizes
        with tf.device("CPU:0"):
            if self._table is None:
                with tf.init_scope():  # outside of the graph
                    zeros = tf.zeros((CAPACITY, 2, len(sizes)), tf.float64)
                    self._table = tf.Variable(zeros, trainable=False)
                    self._num_steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            step = self._num_steps.assign_add(1) - 1
            self._table[step % CAPACITY].assign(tf.stack([tf.stack(ready), tf.stack(done)]))

    def example(self, num_gradients: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Returns two functions: a graph with this log and nothing else, and one without.

        Their difference is what the log adds to a step of so many gradients.
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

    def read(self) -> None:
        """Takes the steps since the last time out of the table, which holds `CAPACITY`."""
        if self._table is None:
            return
        num_steps = int(self._num_steps.numpy())
        first = max(self._num_read, num_steps - CAPACITY)
        rows = self._table.numpy()[np.arange(first, num_steps) % CAPACITY]
        self._num_read, self._num_unread = num_steps, 0
        if not len(rows):
            return
        seconds = (rows[:, 1] - rows[:, 0]).sum(axis=0)
        for (name, num_bytes), total_s in zip(self._sizes.items(), seconds, strict=True):
            self._log.add("horovod", f"allreduce {name}", num_bytes, float(total_s), len(rows))
        exposed = np.maximum(rows.max(axis=2), rows[:, :1].max(axis=2))
        phases.add_communication(float((exposed[:, 1] - exposed[:, 0]).sum()))
        self._unread.append(GradientSteps(exposed, _union_s(rows)))

    def count_step(self) -> None:
        """Is to be called before each step, so that the table is read before it is full."""
        self._num_unread += 1
        if self._num_unread > CAPACITY:
            self.read()

    def take(self) -> tuple[float, float]:
        """Returns the exposed time and that of all exchange, in s, since this was called last."""
        self.read()
        taken, self._unread = self._unread, []
        exposed_s = sum(float(np.diff(steps.exposed).sum()) for steps in taken)
        return exposed_s, sum(float(steps.busy_s.sum()) for steps in taken)


def _union_s(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the time in which any interval of a row is under way.

    Args:
        rows: Begins and ends, shape (rows, 2, intervals).
    """
    order = np.argsort(rows[:, 0], axis=1)
    begins = np.take_along_axis(rows[:, 0], order, axis=1)
    ends = np.take_along_axis(rows[:, 1], order, axis=1)
    covered_to = np.maximum.accumulate(ends, axis=1)
    before = np.concatenate([begins[:, :1], covered_to[:, :-1]], axis=1)
    covered = np.maximum(covered_to - np.maximum(begins, before), 0)
    return np.asarray(covered.sum(axis=1))
