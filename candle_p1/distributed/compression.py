"""Gradients as float16 between the ranks: half the bytes, without overflow at any number of ranks.

float16 ends at 65,504 and begins at 6e-8. With Horovod's own compression, which divides by P after
the sum, gradients overflow from 65,504 / P on. To divide before the sum would lose small elements
instead, at 4,096 ranks all below 1e-4, and Horovod's prescale factor would do just that, because it
acts on the float16 values.

So each gradient is multiplied, while it is still float32, by a power of two that depends on the
largest element of any rank: P times that element comes to lie between 2^13 and 2^15. A sum then has
at least a factor of two to spare for rounding, whatever the order of its additions; elements
2^-17 as large as the largest still have all of float16's 11 bits at 4,096 ranks, and some of them
down to 2^-27. It costs a second allreduce, of one number, before that of each gradient.

What remains are the roundings of float16's additions: where P values of one sign are added one by
one, as by a ring, a sum of 2,048 equal ones does not change when the next one is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

EXPONENT_BITS = 0x7F800000
"""Of a float32. The other bits are sign and fraction, so these alone are a power of two."""
TOP = 2.0**14
"""What the power of two below the largest element, times P, is scaled to."""
LARGEST_FLOAT32 = 3.4028234663852886e38
LARGEST_BYTES = 4
"""The size of the number that is sent in addition to a gradient."""
_SMALLEST_POWER, _LARGEST_POWER = 2.0**-80, 2.0**100


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
        num_ranks: The number of ranks, P.
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
    return ops.where(ops.isfinite(largest), largest, LARGEST_FLOAT32)


def scale_for(largest: Any, num_ranks: int) -> Any:
    """Returns the factor by which all ranks multiply a gradient; a power of two.

    It has the same bits on all ranks, also on processors of different kinds, because it is made of
    the bits of the largest element, and not computed by a logarithm.

    Args:
        largest: The largest element of any rank, a float32 scalar.
        num_ranks: The number of ranks.
    """
    from keras import ops

    bits = ops.bitwise_and(_bitcast(largest, "int32"), EXPONENT_BITS)
    power = ops.clip(_bitcast(bits, "float32"), _SMALLEST_POWER, _LARGEST_POWER)
    return TOP / 2.0 ** (num_ranks - 1).bit_length() / power


def _bitcast(value: Any, dtype: str) -> Any:
    """Returns the same bits as another type, which no operation of Keras does."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.bitcast_convert_type(value, dtype)
    import tensorflow as tf

    return tf.bitcast(value, dtype)
