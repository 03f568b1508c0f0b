"""The allreduces of a graph of TensorFlow, which reads the clock itself.

The graph writes one row per step into a table. On a GPU, the clock is read when one element of the
tensor has arrived on the host: when the GPU has computed the tensor, and the time of that copy
later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed.allreduce_log import CAPACITY, AllreduceLog
from candle_p1.ops import read_clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from candle_p1.instrument.collectives import CommunicationLog


class GraphLog(AllreduceLog):
    """The allreduces of a model that TensorFlow trains."""

    def __init__(self, log: CommunicationLog) -> None:
        super().__init__(log)
        self._sizes: dict[str, int] = {}
        self._num_read = 0
        self._table: Any = None

    def write(
        self,
        ready: list[Any],
        done: list[Any],
        sizes: dict[str, int],
        *,
        library: str = "horovod",
        on_gpu: bool = False,
    ) -> None:
        """Writes the times of one step into the table; part of the graph.

        Args:
            ready: The time at which each gradient was ready.
            done: The time at which each average was available.
            sizes: The number of bytes sent for each gradient, by name.
            library: What averages them.
            on_gpu: Whether gradients are on a GPU.
        """
        import tensorflow as tf

        self._sizes, self.library = sizes, library
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
        """Returns two functions: a graph that does nothing but log, and one that does nothing."""
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

    def _take_rows(self) -> tuple[dict[str, int], NDArray[np.float64]]:
        """Returns the steps that the table holds and that have not been read yet."""
        if self._table is None:
            return {}, np.empty((0, 2, 0))
        num_steps = int(self._num_steps.numpy())
        first = max(self._num_read, num_steps - CAPACITY)
        rows = self._table.numpy()[np.arange(first, num_steps) % CAPACITY]
        self._num_read = num_steps
        return self._sizes, rows
