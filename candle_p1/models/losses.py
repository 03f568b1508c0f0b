"""Losses that are the same function with every backend of Keras."""

from __future__ import annotations

from typing import Any

CROSS_ENTROPY = "categorical_crossentropy"
SMALLEST = 1e-7
"""How close to 0 and 1 a probability may be, as in Keras."""


def same_loss(name: str, activation: str) -> Any:
    """Returns a loss that computes what TensorFlow does, on which CANDLE runs.

    TensorFlow remembers what a sigmoid was computed from, and takes the softmax of that as the
    probabilities of a categorical cross-entropy. Other backends divide the sigmoids by their sum,
    which is another function with other gradients.

    Args:
        name: A loss of Keras.
        activation: The activation of the last layer.
    """
    import keras

    is_same = keras.backend.backend() == "tensorflow"
    if is_same or (name, activation) != (CROSS_ENTROPY, "sigmoid"):
        return name
    return categorical_crossentropy


def categorical_crossentropy(targets: Any, sigmoids: Any) -> Any:
    """Returns the cross-entropy of each sample, whose probabilities are the softmax of logits.

    The logits are those of which the sigmoids were computed. Where a sigmoid is within 1e-7 of 0 or
    1, they are limited to 16.1; float32 knows those of 10 to 1e-3.

    Args:
        targets: One-hot, shape (samples, classes).
        sigmoids: The model's outputs, in the same shape.
    """
    from keras import ops

    sigmoids = ops.clip(sigmoids, SMALLEST, 1 - SMALLEST)
    logits = ops.log(sigmoids) - ops.log1p(-sigmoids)
    return ops.categorical_crossentropy(targets, logits, from_logits=True)
