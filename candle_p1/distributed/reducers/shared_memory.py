"""Averages over the ranks of one node, and updates by them, through memory that they share.

MPI copies an array several times from one process to another. Here ranks go through their arrays
together, in pieces that fit into their caches (candle_p1/ops/source/node_memory.h).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from candle_p1 import ops
from candle_p1.distributed.comm import Communicator, on_first_rank
from candle_p1.distributed.reducers.reducer import GraphReducer
from candle_p1.distributed.shared_file import MEMORY, NoRoomError, check_room, open_nameless
from candle_p1.ops.updates import Update, standing_for, update

MAX_THREADS = 8
"""The threads of a rank that average: more do not use more of the memory's bandwidth."""


class SharedMemoryReducer(GraphReducer):
    """Averages on the CPUs of one node. Making it is collective.

    Ranks wait for each other, so all of them must execute the operations in the same order. A rank
    that does not come within `timeout_s` ends an operation with an error; 0: never.

    Raises:
        NoRoomError: The ranks cannot share memory; the same on all of them.
    """

    name = "shared memory"

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        super().__init__(comm)
        self._timeout_s = timeout_s
        self._num_threads = min(MAX_THREADS, *comm.allgather(ops.num_threads()))
        num_bytes = ops.node_memory_bytes(comm.size, self._num_threads)
        file = open_nameless(MEMORY, num_bytes, comm)
        try:
            on_first_rank(comm, self._allocate, file, num_bytes)
            self._mapping = mmap.mmap(file, num_bytes)
        finally:
            os.close(file)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def average(self, gradients: Mapping[str, Any], after: Sequence[Any] = ()) -> list[Any]:
        """Returns the averages, of which the first is begun when all gradients are there.

        TensorFlow orders what is ready in its own way on each rank.
        """
        before = [*gradients.values(), *after]
        averages: list[Any] = []
        for name, gradient in gradients.items():
            averages.append(self.average_tensor(gradient, name, averages[-1:] or before))
        return averages

    def average_tensor(self, value: Any, name: str, after: Sequence[Any] = ()) -> Any:
        """Returns the average of all ranks' tensors, of the same shape and name.

        Those of float16 and bfloat16 are added as float32.
        """
        import tensorflow as tf

        dtype = value.dtype
        wide = tf.cast(value, tf.float32) if dtype.size == 2 else value
        return tf.cast(self._exchange(wide, name, -1, after), dtype)

    def fused_update(
        self,
        step: Update,
        weights: Sequence[Any],
        gradients: Mapping[str, Any],
        after: Sequence[Any] = (),
    ) -> Any:
        """Averages gradients and updates weights by them, in one pass over memory.

        Each rank computes a part of every weight and of its state, and copies the other parts, so
        all have the same bits. Weights and gradients are float32; of `Factors`, ranks exchange
        these. For names and `after`, see `average`. Returns the time in which this rank neither
        waited for others nor copied for them, in s.
        """
        import tensorflow as tf

        tensors = {name: standing_for(gradient) for name, gradient in gradients.items()}
        shapes = [f"{name} {tensor.shape}" for name, tensor in tensors.items()]
        with tf.control_dependencies([*tensors.values(), *after]):
            return update(
                step, weights, list(gradients.values()), **self._ranks(f"{step.rule} {shapes}")
            )

    def broadcast_tensor(self, value: Any, name: str, root: int) -> Any:
        """Returns the root's tensor, of any type of numbers; its bits are copied."""
        import tensorflow as tf

        dtype = value.dtype
        sent = {4: tf.float32, 8: tf.float64}.get(dtype.size)
        if sent is None:  # float32 has all values of the smaller types
            return tf.cast(self._exchange(tf.cast(value, tf.float32), name, root), dtype)
        return tf.bitcast(self._exchange(tf.bitcast(value, sent), name, root), dtype)

    def _exchange(self, value: Any, name: str, root: int, after: Sequence[Any] = ()) -> Any:
        """Returns the root's tensor, or the average of all if the root is -1."""
        import tensorflow as tf

        with tf.control_dependencies(list(after)):
            what = f"{name} {value.shape} {value.dtype.name} {root}"
            return ops.load().candle_p1_average_on_node(value, root=root, **self._ranks(what))

    def _ranks(self, what: str) -> dict[str, Any]:
        """Returns the attributes of an operation of all ranks, which pass the same `what`."""
        return {
            "memory": self._address,
            "tag": zlib.crc32(what.encode()),
            "rank": self.comm.rank,
            "num_ranks": self.comm.size,
            "threads": self._num_threads,
            "timeout_s": self._timeout_s,
        }

    def _allocate(self, file: int, num_bytes: int) -> None:
        """Allocates the memory, so that writing to it cannot fail."""
        try:
            check_room(file, num_bytes, MEMORY, self.comm.size)
            os.posix_fallocate(file, 0, num_bytes)
        except OSError as error:
            raise NoRoomError(
                f"no space for {num_bytes >> 20} MiB through which the ranks of a node average:"
                f" {error.strerror}",
                MEMORY,
            ) from error
