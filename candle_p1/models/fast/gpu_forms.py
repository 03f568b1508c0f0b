"""The fast forms for GPUs, in JAX. XLA fuses them with what surrounds them.

What is slow on GPUs, and what is done instead:

- cuDNN computes a convolution of one channel at a small fraction of the speed of memory. As the
  product of all windows with the kernel it costs little more than writing its output. The gradient
  of the kernel remains cuDNN's.
- XLA finds the gradient of a pooling by comparing all values once more, and adds it to zeros in an
  order that is not fixed. The place of each maximum, one byte, is kept instead.
- The gradient of a dense layer's kernel for few samples is as large as the kernel, but little work.
  As a sum of outer products XLA fuses it with the update, so it is neither written nor read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

MAX_OUTER_PRODUCTS = 32
"""For how many samples the gradient of a kernel is a sum of outer products: more take longer than
the traffic that they save."""
MAX_POOL = 127
"""The largest pool in which a place is one byte."""
LEAST_WEIGHTS = 1 << 22
"""How large such a kernel is at least: one of several times an L2 cache's size."""


@jax.custom_vjp  # type: ignore[untyped-decorator]
def convolve_channel(inputs: Any, kernel: Any) -> Any:
    """Returns the convolution of one channel with a stride of one and no padding.

    Inputs have shape (batch, length, 1), the kernel (taps, 1, filters), and the outputs (batch,
    length - taps + 1, filters).
    """
    taps, _, filters = kernel.shape
    positions = inputs.shape[1] - taps + 1
    windows = jnp.concatenate([inputs[:, k : k + positions] for k in range(taps)], axis=2)
    return windows @ kernel.reshape(taps, filters)


def _by_cudnn(inputs: Any, kernel: Any) -> Any:
    layout = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(inputs, kernel, (1,), "VALID", dimension_numbers=layout)


convolve_channel.defvjp(
    lambda inputs, kernel: (convolve_channel(inputs, kernel), (inputs, kernel)),
    lambda kept, upstream: jax.vjp(_by_cudnn, *kept)[1](upstream),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def pool(inputs: Any, size: int) -> Any:
    """Returns the maxima of neighbouring positions; of equal ones, the first has the gradient.

    Inputs have shape (batch, positions, channels), and maxima (batch, positions // size, channels).
    A size is at most MAX_POOL; positions after the last whole pool are left out.
    """
    return _pools(inputs, size).max(axis=2)


def _pools(inputs: Any, size: int) -> Any:
    batch, positions, channels = inputs.shape
    num_pools = positions // size
    return inputs[:, : num_pools * size].reshape(batch, num_pools, size, channels)


def _pool_forward(inputs: Any, size: int) -> tuple[Any, Any]:
    pools = _pools(inputs, size)
    return pools.max(axis=2), (pools.argmax(axis=2).astype(jnp.int8), inputs.shape[1])


def _pool_backward(size: int, kept: Any, upstream: Any) -> tuple[Any]:
    places, positions = kept
    batch, num_pools, channels = upstream.shape
    is_largest = places[:, :, None] == jnp.arange(size, dtype=jnp.int8)[:, None]
    gradient = jnp.where(is_largest, upstream[:, :, None], 0)
    gradient = gradient.reshape(batch, num_pools * size, channels)
    rest = positions - num_pools * size
    return (jnp.pad(gradient, ((0, 0), (0, rest), (0, 0))),)


pool.defvjp(_pool_forward, _pool_backward)


def multiply(inputs: Any, kernel: Any) -> Any:
    """Returns a dense layer's product, shape (batch, units).

    The inputs have shape (batch, features), the kernel (features, units).
    """
    if inputs.shape[0] > MAX_OUTER_PRODUCTS or kernel.size < LEAST_WEIGHTS:
        return inputs @ kernel
    return _multiply(inputs, kernel)


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _multiply(inputs: Any, kernel: Any) -> Any:
    return inputs @ kernel


def _multiply_backward(kept: Any, upstream: Any) -> tuple[Any, Any]:
    inputs, kernel = kept
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    outer = sum(
        sample[:, None].astype(wide) * each[None].astype(wide)
        for sample, each in zip(inputs, upstream, strict=True)
    )
    return upstream @ kernel.T, outer.astype(kernel.dtype)


_multiply.defvjp(lambda inputs, kernel: (inputs @ kernel, (inputs, kernel)), _multiply_backward)
