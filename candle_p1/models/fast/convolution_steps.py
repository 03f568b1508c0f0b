"""What a training step computes of a convolution, alone and by a given algorithm, to be timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from candle_p1.models.fast.convolutions import compute_in, convolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.models.fast.convolution_costs import Convolution


def step_of(algorithm: str, of: Convolution) -> Callable[[], Any]:
    """Returns a function that computes a convolution's outputs and gradients by an algorithm.

    The function returns the gradients of the weights and, if that is wanted, of the input, given
    the same random gradient of the outputs at every call.
    """
    random = np.random.default_rng(0)
    channels = 1 if of.first_taps else of.channels

    def drawn(*shape: int) -> Any:
        return tf.constant(random.standard_normal(shape, dtype=np.float32))

    values = drawn(of.batch, of.length, channels)
    weights = [
        each
        for layer in of.separate
        for each in (drawn(layer.taps, layer.channels, layer.filters), drawn(layer.filters))
    ]
    upstream = drawn(of.batch, of.positions // of.pool, of.filters)
    wanted = [*weights, values] if of.gives_gradient else weights

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(wanted)
            outputs = _outputs(algorithm, of, values, weights)
        return tape.gradient(outputs, wanted, output_gradients=upstream)

    compute: Callable[[], Any] = step
    return compute


def _outputs(algorithm: str, of: Convolution, values: Any, weights: list[Any]) -> Any:
    """Returns the maxima of the convolutions by an algorithm."""
    if algorithm == "plain":
        for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
            image = keras.ops.conv(values, kernel, 1, "valid")
            values = keras.ops.relu(image + keras.ops.reshape(bias, (1, 1, -1)))
        return values if of.pool == 1 else keras.ops.max_pool(values, of.pool, of.pool)
    *first, kernel, bias = weights
    if first:
        values = (
            convolve(values, *first, rectify=True)
            if algorithm == "tiled"
            else compute_in(algorithm, values, first[0], first[1], 1)
        )
    return compute_in(algorithm, values, kernel, bias, of.pool)
