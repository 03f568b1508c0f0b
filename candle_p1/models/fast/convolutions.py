"""The fast 1D convolutions, in TensorFlow.

There are four algorithms, which compute the same:

- oneDNN's ("whole"), with bias and relu in the same operation.
- The same, but with the gradient of the kernel by chunks ("chunked"). oneDNN computes it at a
  small fraction of the speed of matrix products for a long sequence of many channels, but nearly at
  full speed for many short ones, so long ones are cut.
- By tiles (candle_p1.ops), which takes fewer multiplications where there are many channels and
  filters. Bias, relu and a pooling that follows are part of it, so that only the maxima are written
  to memory. So is a convolution of one channel before it, whose output is not kept: it is computed
  once more for the gradient.
- Directly, together with bias, relu and the pooling that follows ("direct"; candle_p1.ops), where
  there are few channels, and oneDNN's time goes into writing and reading what is pooled.

Which one a layer takes is a rule of candle_p1.models.fast.convolution_algorithms.

Each layer calls these functions by itself. A convolution leaves a note on its output, by which the
next layer can take over what it has done; TensorFlow then drops the operation whose output nobody
uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from candle_p1 import ops
from candle_p1.models.fast import CHUNK
from candle_p1.models.fast.convolution_algorithms import IN_BLOCKS, Convolution

_ATTRIBUTE = "_candle_p1_convolution"


@dataclass(frozen=True, eq=False)
class Note:
    """How a tensor was made."""

    inputs: Any  # shape (batch, length, channels)
    kernel: Any  # shape (taps, channels, filters)
    bias: Any  # shape (filters,)
    rectify: bool  # negative values were replaced by zeros

    def algorithm(self, pool: int = 1) -> str:
        """Returns the algorithm for this convolution and a pooling that follows it."""
        taps, channels, filters = self.kernel.shape
        convolution = Convolution(self.inputs.shape[1], taps, channels, filters, pool)
        return convolution.choose(in_blocks=self.inputs.dtype == tf.float32)

    @property
    def can_be_computed_again(self) -> bool:
        """Whether a convolution by tiles can take this one over."""
        return self.rectify and self.kernel.shape[1] == 1 and self.inputs.dtype == tf.float32


def convolve(inputs: Any, kernel: Any, bias: Any, *, rectify: bool) -> Any:
    """Returns the 1D convolution with a stride of one and no padding, plus a bias for each filter.

    See `Note` for the arguments. The outputs have shape (batch, length - taps + 1, filters).
    """
    convolution = Note(inputs, kernel, bias, rectify)
    outputs = compute(convolution, convolution.algorithm())
    setattr(outputs, _ATTRIBUTE, convolution)
    return outputs


def pool(inputs: Any, size: int) -> Any | None:
    """Returns the maxima of neighbouring positions if the convolution before can compute them.

    Inputs have shape (batch, positions, channels), and maxima (batch, positions // size, channels).
    """
    convolution = getattr(inputs, _ATTRIBUTE, None)
    if convolution is None or size <= 1:
        return None
    algorithm = convolution.algorithm(size)
    return compute(convolution, algorithm, size) if algorithm in IN_BLOCKS else None


def compute(convolution: Note, algorithm: str, pool: int = 1) -> Any:
    """Returns the outputs; the maxima of each pool if the algorithm has the pooling in it."""
    if algorithm in IN_BLOCKS:
        return _in_blocks(convolution, pool, by_tiles=algorithm == "tiled")
    return _by_onednn(convolution, chunked=algorithm == "chunked")


def _in_blocks(convolution: Note, pool: int, *, by_tiles: bool) -> Any:
    inputs, kernel, bias = convolution.inputs, convolution.kernel, convolution.bias
    settings = {
        "pool": pool,
        "rectify": int(convolution.rectify),
        "by_tiles": int(by_tiles),
        "threads": ops.num_threads(),
    }
    num_pools = (inputs.shape[1] - kernel.shape[0] + 1) // pool
    first = getattr(inputs, _ATTRIBUTE, None)
    if by_tiles and first is not None and first.can_be_computed_again:
        values, before = first.inputs, (first.kernel, first.bias)
    else:
        values, before = inputs, _no_first(kernel)
    outputs = _fused(values, *before, kernel, bias, settings=settings)
    outputs.set_shape((inputs.shape[0], num_pools, kernel.shape[2]))
    return outputs


def _no_first(kernel: Any) -> tuple[Any, Any]:
    return tf.zeros((0, 1, kernel.shape[1])), tf.zeros((0,))


def _fused(
    values: Any,
    first_kernel: Any,
    first_bias: Any,
    kernel: Any,
    bias: Any,
    *,
    settings: dict[str, int],
) -> Any:
    """Returns the maxima of a convolution of the values.

    If the first kernel is not empty, it is that of a rectified convolution of one channel before.
    """
    has_first = first_kernel.shape[0] > 0

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def compute(values: Any, first_kernel: Any, first_bias: Any, kernel: Any, bias: Any) -> Any:
        first = first_kernel, first_bias
        maxima, places = ops.load().candle_p1_convolve(values, *first, kernel, bias, **settings)

        def gradient(upstream: Any) -> tuple[Any, ...]:
            def gradients(*, only_values: bool) -> Any:
                return ops.load().candle_p1_convolve_gradient(
                    values,
                    *first,
                    kernel,
                    maxima,
                    places,
                    upstream,
                    only_values=int(only_values),
                    **settings,
                )

            # That of a model's inputs is not wanted, and TensorFlow drops it then.
            if has_first:
                with tf.GradientTape() as tape:
                    tape.watch(values)
                    between = _by_onednn(Note(values, *first, rectify=True), chunked=True)
                    again = _fused(between, *_no_first(kernel), kernel, bias, settings=settings)
                of_values = tape.gradient(again, values, output_gradients=upstream)
            else:
                of_values = gradients(only_values=True).of_values
            found = gradients(only_values=False)
            of_weights = (
                found.of_first_kernel,
                found.of_first_biases,
                found.of_kernel,
                found.of_biases,
            )
            return _shaped_like((values, *first, kernel, bias), (of_values, *of_weights))

        return maxima, gradient

    return compute(values, first_kernel, first_bias, kernel, bias)


def _shaped_like(tensors: tuple[Any, ...], gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns gradients that know their shape, which TensorFlow does not know of our operations.

    The log of communication needs it.
    """
    for tensor, gradient in zip(tensors, gradients, strict=True):
        gradient.set_shape(tensor.shape)
    return gradients


def _by_onednn(convolution: Note, *, chunked: bool) -> Any:
    rectify = convolution.rectify
    kernel_gradient = _kernel_gradient_of_chunks if chunked else _kernel_gradient

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
                kernel_gradient(inputs, upstream, kernel.shape),
                tf.raw_ops.BiasAddGrad(out_backprop=upstream),
            )

        return outputs, gradient

    return compute(convolution.inputs, convolution.kernel, convolution.bias)


def _kernel_gradient(inputs: Any, upstream: Any, shape: tuple[int, int, int]) -> Any:
    gradient = tf.raw_ops.Conv2DBackpropFilter(
        input=inputs[:, tf.newaxis],
        filter_sizes=[1, *shape],
        out_backprop=upstream[:, tf.newaxis],
        strides=[1, 1, 1, 1],
        padding="VALID",
    )
    return tf.squeeze(gradient, axis=0)


def _kernel_gradient_of_chunks(inputs: Any, upstream: Any, shape: tuple[int, int, int]) -> Any:
    """Returns what `_kernel_gradient` does, from samples that are short.

    It is a sum over positions, so each chunk of positions can become a sample of its own. The
    last chunk of a sequence is padded with zeros.
    """
    size, channels, filters = shape
    positions = upstream.shape[1]
    num = -(-positions // CHUNK)
    missing = num * CHUNK - positions
    padded = tf.pad(upstream, [[0, 0], [0, missing], [0, 0]])
    longer = tf.pad(inputs, [[0, 0], [0, missing], [0, 0]])
    chunks = tf.signal.frame(longer, CHUNK + size - 1, CHUNK, axis=1)
    return _kernel_gradient(
        tf.reshape(chunks, [-1, CHUNK + size - 1, channels]),
        tf.reshape(padded, [-1, CHUNK, filters]),
        shape,
    )
