"""Averages over the ranks of one node, and updates by them, through memory that they share.

MPI copies an array several times from one process to another. Here ranks go through their arrays
together, in pieces that fit into their caches (candle_p1/ops/source/node_memory.h).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import zlib
from typing import TYPE_CHECKING, Any

from candle_p1 import ops
from candle_p1.distributed.comm import on_first_rank
from candle_p1.distributed.shared_file import MEMORY, NoRoomError, check_room, open_nameless

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.distributed.comm import Communicator
    from candle_p1.ops.updates import Update

MAX_THREADS = 8
"""The threads of a rank that average: more do not use more of the memory's bandwidth."""


class NodeMemory:
    """Memory through which the ranks of a job on one node average. Making it is collective.

    Args:
        comm: The ranks, all of which are on this node.
        patience_s: The time after which a rank that has not come ends an average with an error;
            0: never.

    Raises:
        NoRoomError: The ranks cannot share memory; the same on all of them.
    """

    def __init__(self, comm: Communicator, patience_s: float) -> None:
        self._comm, self._patience_s = comm, patience_s
        self._num_threads = min(MAX_THREADS, *comm.allgather(ops.num_threads()))
        num_bytes = ops.node_memory_bytes(comm.size, self._num_threads)
        file = open_nameless(MEMORY, num_bytes, comm)
        try:
            on_first_rank(lambda: self._allocate(file, num_bytes), comm)
            self._mapping = mmap.mmap(file, num_bytes)
        finally:
            os.close(file)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def average(self, value: Any, name: str, after: Sequence[Any] = ()) -> Any:
        """Returns the average of all ranks' tensors; collective, on CPUs.

        Ranks wait for each other, so all of them must execute the operations in the same order.
        float16 and bfloat16 are added as float32.

        Args:
            value: A tensor with the same shape on all ranks.
            name: Its name, the same on all ranks.
            after: Tensors that must be there before.
        """
        import tensorflow as tf

        dtype = value.dtype
        if dtype in (tf.float16, tf.bfloat16):
            value = tf.cast(value, tf.float32)
        return tf.cast(self._exchange(value, name, after, root=-1), dtype)

    def update(
        self,
        update: Update,
        weights: Sequence[Any],
        gradients: Mapping[str, Any],
        after: Sequence[Any] = (),
    ) -> Any:
        """Updates weights by the averages of all ranks' gradients; collective, on CPUs.

        Each rank computes a part of every weight and of its state, and copies the other parts, so
        all have the same bits. The order of operations matters as in `average`.

        Args:
            update: The step of the optimizer.
            weights: Variables, float32.
            gradients: Tensors of the same shapes, float32, by names that all ranks have in common.
            after: Tensors that must be there before.

        Returns:
            The time in which this rank neither waited for others nor copied for them, in s.
        """
        import tensorflow as tf

        shapes = [f"{name} {gradient.shape}" for name, gradient in gradients.items()]
        with tf.control_dependencies(list(after)):
            return update.execute(
                weights, list(gradients.values()), **self._ranks(f"{update.rule} {shapes}")
            )

    def broadcast(self, value: Any, name: str, root: int, after: Sequence[Any] = ()) -> Any:
        """Returns the root's tensor, of any type of numbers, on all ranks; otherwise as `average`.

        Its bits are copied, whatever they stand for.
        """
        import tensorflow as tf

        dtype = value.dtype
        sent = {4: tf.float32, 8: tf.float64}.get(dtype.size)
        if sent is None:  # float32 has all values of the smaller types
            return tf.cast(self._exchange(tf.cast(value, tf.float32), name, after, root), dtype)
        return tf.bitcast(self._exchange(tf.bitcast(value, sent), name, after, root), dtype)

    def _exchange(self, value: Any, name: str, after: Sequence[Any], root: int) -> Any:
        import tensorflow as tf

        with tf.control_dependencies(list(after)):
            what = f"{name} {value.shape} {value.dtype.name} {root}"
            return ops.load().candle_p1_average_on_node(value, root=root, **self._ranks(what))

    def _ranks(self, what: str) -> dict[str, Any]:
        """Returns the attributes of an operation of all ranks, which pass the same `what`."""
        return {
            "memory": self._address,
            "tag": zlib.crc32(what.encode()),
            "rank": self._comm.rank,
            "num_ranks": self._comm.size,
            "threads": self._num_threads,
            "patience_s": self._patience_s,
        }

    def _allocate(self, file: int, num_bytes: int) -> None:
        """Allocates the memory, so that writing to it cannot fail.

        Raises:
            NoRoomError: There is not enough.
        """
        try:
            check_room(file, num_bytes, MEMORY, self._comm.size)
            os.posix_fallocate(file, 0, num_bytes)
        except OSError as error:
            raise NoRoomError(
                f"no space for {num_bytes >> 20} MiB through which the ranks of a node average:"
                f" {error.strerror}",
                MEMORY,
            ) from error
