"""What reducers have in common: their interface, and gradients as float16 between the ranks.

float16 ends at 65,504 and begins at 6e-8. A sum of P gradients that is divided by P afterwards, as
Horovod's own compression does, overflows from 65,504 / P on; to divide before the sum would lose
all elements below P x 3e-8.

So each gradient is multiplied, while it is still float32, by a power of two that depends on the
largest element of any rank: P times that element comes to lie between 2^13 and 2^15. A sum then has
at least a factor of two to spare for rounding, whatever the order of its additions; elements
2^-17 as large as the largest still have all of float16's 11 bits at 4,096 ranks, and some of them
down to 2^-27. It costs a second allreduce, of one number, before that of each gradient.

What remains are the roundings of float16's additions: where P values of one sign are added one by
one, as by a ring, a sum of 2,048 equal ones does not change when the next one is added.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from candle_p1.distributed.comm import Communicator
from candle_p1.errors import SetupError
from candle_p1.instrument.collectives import note_collective

COMPRESSIONS = ("none", "fp16")
"""How gradients are sent."""


class Reducer(ABC):
    """Averages arrays over the ranks of a job. All ranks call its methods, in the same order.

    Compression is one of COMPRESSIONS.
    """

    name: str
    """As logs of communication name it."""

    def __init__(self, comm: Communicator, compression: str = "none") -> None:
        self.comm, self.compression = comm, compression

    @property
    def settings(self) -> dict[str, str]:
        """Its settings, for the record."""
        return {}

    def check_rank(self, rank: int, size: int, why: str) -> None:
        """Raises SetupError if a library takes this rank for another one; the message says why."""
        if (rank, size) != (self.comm.rank, self.comm.size):
            raise SetupError(
                f"this process is rank {rank} of {size} in {self.name}, but rank"
                f" {self.comm.rank} of {self.comm.size} in MPI: {why}"
            )

    @abstractmethod
    def average(self, gradients: Mapping[str, Any], after: Sequence[Any] = ()) -> list[Any]:
        """Returns the averages of gradients over ranks, in their order; part of a training step.

        They are dense tensors, by names that are the same on all ranks. Tensors of `after` must be
        there before anything that waits for other ranks.
        """

    @abstractmethod
    def broadcast(self, variables: Sequence[Any], root: int) -> None:
        """Copies the bits of the root's Keras variables to every rank.

        The time that is logged is that of the broadcast alone, without the framework's preparation.
        """

    def num_bytes(self, gradient: Any) -> int:
        """Returns how many bytes of a gradient a rank sends."""
        num_elements = int(math.prod(gradient.shape))
        if self.compression == "fp16":
            return num_elements * 2 + 4  # for its largest element
        from keras import backend

        return num_elements * int(backend.standardize_dtype(gradient.dtype)[-2:]) // 8


class SerialReducer(Reducer):
    """A single process, whose gradients are the averages."""

    name = "serial"

    def average(self, gradients: Mapping[str, Any], after: Sequence[Any] = ()) -> list[Any]:
        return list(gradients.values())

    def broadcast(self, variables: Sequence[Any], root: int) -> None:
        pass


class GraphReducer(Reducer):
    """Operations of TensorFlow."""

    @abstractmethod
    def broadcast_tensor(self, value: Any, name: str, root: int) -> Any:
        """Returns the root's tensor; all ranks pass the same name and shape."""

    def broadcast(self, variables: Sequence[Any], root: int) -> None:
        num_bytes, seconds = 0, 0.0
        for i, variable in enumerate(variables):
            begin = time.perf_counter()
            received = self.broadcast_tensor(variable.value, f"state.{i}", root)
            seconds += time.perf_counter() - begin
            num_bytes += received.shape.num_elements() * received.dtype.size
            variable.value.assign(received)
        note_collective(self.name, "broadcast", num_bytes * (self.comm.rank == root), seconds)


def is_on_gpu(variable: Any) -> bool:
    """Returns whether a Keras variable of TensorFlow, and thereby its gradient, is on a GPU."""
    return "GPU" in str(variable.value.device)


def average_as_half(
    gradient: Any,
    num_ranks: int,
    largest_of_all: Callable[[Any], Any],
    sum_of_all: Callable[[Any], Any],
) -> Any:
    """Returns the average of a gradient over ranks, for which float16 values are summed.

    Where it is infinite or not a number on some rank, so is the average.

    Args:
        gradient: A dense tensor of floating-point numbers; the average has its dtype.
        num_ranks: P.
        largest_of_all: Returns the maximum of a float32 scalar over the ranks; collective.
        sum_of_all: Returns the sum of a float16 tensor over the ranks; collective.
    """
    from keras import backend, ops

    dtype = backend.standardize_dtype(gradient.dtype)
    wide = gradient if dtype == "float64" else ops.cast(gradient, "float32")
    scale = ops.cast(scale_for(largest_of_all(largest_element(wide)), num_ranks), wide.dtype)
    total = sum_of_all(ops.cast(wide * scale, "float16"))
    return ops.cast(ops.cast(total, wide.dtype) * (1 / (scale * num_ranks)), dtype)


def largest_element(gradient: Any) -> Any:
    """Returns the largest absolute value, a float32 scalar; its maximum, if one is not finite."""
    from keras import ops

    largest = ops.cast(ops.max(ops.abs(gradient)), "float32")
    return ops.where(ops.isfinite(largest), largest, np.finfo(np.float32).max)


def scale_for(largest: Any, num_ranks: int) -> Any:
    """Returns the factor by which all ranks multiply a gradient; a power of two.

    It has the same bits on all ranks, also on processors of different kinds, because it is made of
    the bits of the largest element of any rank, a float32 scalar, and not by a logarithm.
    """
    from keras import ops

    # Without sign and fraction, the bits of a float32 are a power of two.
    bits = ops.bitwise_and(_bitcast(largest, "int32"), 0x7F800000)
    power = ops.clip(_bitcast(bits, "float32"), 2.0**-80, 2.0**100)
    return 2.0**14 / 2.0 ** (num_ranks - 1).bit_length() / power


def _bitcast(value: Any, dtype: str) -> Any:
    """Returns the same bits as another type, which no operation of Keras does."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.bitcast_convert_type(value, dtype)
    import tensorflow as tf

    return tf.bitcast(value, dtype)
