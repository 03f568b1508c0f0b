"""The fast 1D convolutions, in TensorFlow.

There are three forms, which compute the same:

- oneDNN's. It computes the gradient of a kernel at a small fraction of the speed of matrix products
  for a long sequence, but nearly at full speed for many short ones, so long ones are cut.
- By tiles (candle_p1.ops), which takes fewer multiplications where there are many channels and
  filters. Bias, relu and a pooling that follows are part of it, so that only the maxima are written
  to memory. So is a convolution of one channel before it, whose output is not kept: it is computed
  once more for the gradient.
- Directly together with the pooling that follows (candle_p1.ops), where there are few channels, and
  oneDNN's time goes into writing and reading what is pooled.

Each layer calls these functions by itself. A convolution leaves a note on its output, by which the
next layer can take over what it has done; TensorFlow then drops the operation whose output nobody
uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from candle_p1 import ops
from candle_p1.models.fast import STRETCH, tile_costs

MAX_POOL = 255
"""The longest pool that a convolution takes over, as it keeps the place of a maximum in a byte."""
MAX_WINDOW = 512
"""The most values on which an output may depend for the direct form to be chosen.

With more of them products of matrices take most of the time, and oneDNN's are as fast."""
_ATTRIBUTE = "_candle_p1_convolution"


@dataclass(frozen=True, eq=False)
class _Note:
    """How a tensor was made.

    Attributes:
        inputs: Shape (batch, length, channels).
        kernel: Shape (taps, channels, filters).
        bias: Shape (filters,).
        rectify: Whether negative values were replaced by zeros.
    """

    inputs: Any
    kernel: Any
    bias: Any
    rectify: bool

    @property
    def by_tiles(self) -> bool:
        """Whether tiles are the faster form."""
        taps, channels, filters = self.kernel.shape
        pay = tile_costs.pay(self.inputs.shape[1] - taps + 1, taps, channels, filters)
        return pay and bool(self.inputs.dtype == tf.float32)

    @property
    def is_small(self) -> bool:
        """Whether memory, and not multiplications, takes the time."""
        taps, channels, _ = self.kernel.shape
        return bool(self.inputs.dtype == tf.float32) and taps * channels <= MAX_WINDOW

    @property
    def can_be_computed_again(self) -> bool:
        """Whether a convolution by tiles can take this one over."""
        return self.rectify and self.kernel.shape[1] == 1 and self.inputs.dtype == tf.float32


def convolve(inputs: Any, kernel: Any, bias: Any, *, rectify: bool) -> Any:
    """Returns the 1D convolution with a stride of one and no padding, plus a bias for each filter.

    Args:
        inputs: Shape (batch, length, channels).
        kernel: Shape (taps, channels, filters).
        bias: Shape (filters,).
        rectify: Whether to replace negative values by zeros.

    Returns:
        A tensor of shape (batch, length - taps + 1, filters).
    """
    convolution = _Note(inputs, kernel, bias, rectify)
    compute = _in_blocks if convolution.by_tiles else _by_onednn
    outputs = compute(convolution)
    setattr(outputs, _ATTRIBUTE, convolution)
    return outputs


def pool(inputs: Any, size: int) -> Any | None:
    """Returns the maxima of neighbouring positions if the convolution before can compute them.

    Args:
        inputs: Shape (batch, positions, channels).
        size: The positions of a pool; those after the last whole one do not count.

    Returns:
        A tensor of shape (batch, positions // size, channels), or None.
    """
    convolution = getattr(inputs, _ATTRIBUTE, None)
    if convolution is None or not 1 < size <= min(MAX_POOL, inputs.shape[1]):
        return None
    if not (convolution.by_tiles or convolution.is_small):
        return None
    return _in_blocks(convolution, size)


def _in_blocks(convolution: _Note, pool: int = 1) -> Any:
    """Returns the outputs, or the maxima of each pool of them."""
    inputs, kernel, bias = convolution.inputs, convolution.kernel, convolution.bias
    settings = {
        "pool": pool,
        "rectify": int(convolution.rectify),
        "by_tiles": int(convolution.by_tiles),
        "threads": ops.num_threads(),
    }
    num_pools = (inputs.shape[1] - kernel.shape[0] + 1) // pool
    first = getattr(inputs, _ATTRIBUTE, None)
    if convolution.by_tiles and first is not None and first.can_be_computed_again:
        outputs = _after_first(
            first.inputs, first.kernel, first.bias, kernel, bias, settings=settings
        )
    else:
        outputs = _of_values(inputs, kernel, bias, settings=settings)
    outputs.set_shape((inputs.shape[0], num_pools, kernel.shape[2]))
    return outputs


def _of_values(values: Any, kernel: Any, bias: Any, *, settings: dict[str, int]) -> Any:
    """Returns the maxima of a convolution of the values."""
    nothing = tf.zeros((0, 1, kernel.shape[1])), tf.zeros((0,))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def compute(values: Any, kernel: Any, bias: Any) -> Any:
        maxima, places = ops.load().candle_p1_convolve(values, *nothing, kernel, bias, **settings)

        def gradient(upstream: Any) -> tuple[Any, Any, Any]:
            # That of a model's inputs is not wanted, and TensorFlow drops it then.
            of_values, of_weights = (
                ops.load().candle_p1_convolve_gradient(
                    values,
                    *nothing,
                    kernel,
                    maxima,
                    places,
                    upstream,
                    only_values=which,
                    **settings,
                )
                for which in (1, 0)
            )
            found = of_values.of_values, of_weights.of_kernel, of_weights.of_biases
            return _shaped_like((values, kernel, bias), found)

        return maxima, gradient

    return compute(values, kernel, bias)


def _after_first(
    values: Any,
    first_kernel: Any,
    first_bias: Any,
    kernel: Any,
    bias: Any,
    *,
    settings: dict[str, int],
) -> Any:
    """Returns the maxima of a convolution that follows a rectified one of one channel."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def compute(values: Any, first_kernel: Any, first_bias: Any, kernel: Any, bias: Any) -> Any:
        first = first_kernel, first_bias
        maxima, places = ops.load().candle_p1_convolve(values, *first, kernel, bias, **settings)

        def gradient(upstream: Any) -> tuple[Any, Any, Any, Any, Any]:
            found = ops.load().candle_p1_convolve_gradient(
                values, *first, kernel, maxima, places, upstream, only_values=0, **settings
            )
            # TensorFlow drops that of the values if it is not wanted.
            with tf.GradientTape() as tape:
                tape.watch(values)
                between = _by_onednn(_Note(values, *first, rectify=True))
                again = _of_values(between, kernel, bias, settings=settings)
            of_values = tape.gradient(again, values, output_gradients=upstream)
            of_weights = (
                found.of_first_kernel,
                found.of_first_biases,
                found.of_kernel,
                found.of_biases,
            )
            return of_values, *_shaped_like((*first, kernel, bias), of_weights)

        return maxima, gradient

    return compute(values, first_kernel, first_bias, kernel, bias)


def _shaped_like(tensors: tuple[Any, ...], gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns gradients that know their shape, which TensorFlow does not know of our operations.

    The log of communication needs it.
    """
    for tensor, gradient in zip(tensors, gradients, strict=True):
        gradient.set_shape(tensor.shape)
    return gradients


def _by_onednn(convolution: _Note) -> Any:
    """Returns the outputs."""
    rectify = convolution.rectify

    # TensorFlow fuses the three operations only within one function.
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def compute(inputs: Any, kernel: Any, bias: Any) -> Any:
        image = tf.nn.conv2d(inputs[:, tf.newaxis], kernel[tf.newaxis], 1, "VALID")
        image = tf.nn.bias_add(image, bias)
        outputs = tf.squeeze(tf.nn.relu(image) if rectify else image, axis=1)

        def gradient(upstream: Any) -> tuple[Any, Any, Any]:
            if rectify:
                upstream = tf.raw_ops.ReluGrad(gradients=upstream, features=outputs)
            return (
                tf.nn.conv1d_transpose(upstream, kernel, tf.shape(inputs), 1, "VALID"),
                _kernel_gradient(inputs, upstream, kernel.shape),
                tf.raw_ops.BiasAddGrad(out_backprop=upstream),
            )

        return outputs, gradient

    return compute(convolution.inputs, convolution.kernel, convolution.bias)


def _kernel_gradient(inputs: Any, upstream: Any, shape: tuple[int, int, int]) -> Any:
    """Returns the gradient of a convolution's kernel, of this shape (size, channels, filters).

    It is a sum over positions, so each stretch of positions can become a sample of its own. The
    last stretch of a sequence is padded with zeros.
    """
    size, channels, filters = shape
    positions = upstream.shape[1]
    num = -(-positions // STRETCH)
    missing = num * STRETCH - positions
    padded = tf.pad(upstream, [[0, 0], [0, missing], [0, 0]])
    longer = tf.pad(inputs, [[0, 0], [0, missing], [0, 0]])
    stretches = tf.signal.frame(longer, STRETCH + size - 1, STRETCH, axis=1)
    gradient = tf.raw_ops.Conv2DBackpropFilter(
        input=tf.reshape(stretches, [-1, 1, STRETCH + size - 1, channels]),
        filter_sizes=[1, size, channels, filters],
        out_backprop=tf.reshape(padded, [-1, 1, STRETCH, filters]),
        strides=[1, 1, 1, 1],
        padding="VALID",
    )
    return tf.squeeze(gradient, axis=0)
