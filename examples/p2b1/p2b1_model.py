"""P2B1's network, with a training step of its own."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops


class Autoencoder(keras.Model):  # type: ignore[misc]
    """An autoencoder that is trained to remove noise, with CANDLE's penalty on what it returns.

    The step computes its own loss and tracks its parts. Whatever a step does, the optimizer is what
    averages the gradients over the ranks, so it must be called once per step, on every rank.
    """

    def prepare(self, noise: float, penalty: float) -> None:
        """Sets the noise on the input, its standard deviation, and the weight of the penalty."""
        self.noise, self.penalty = noise, penalty
        self.random = keras.random.SeedGenerator()
        self.parts = [keras.metrics.Mean(name=name) for name in ("loss", "mse", "size")]

    @property
    def metrics(self) -> list[Any]:
        """The metrics that are reset before, and shown after, an epoch."""
        return self.parts

    def train_step(self, data: tuple[Any, Any]) -> Any:
        """Trains on a batch: noisy molecules, and what they are without noise."""
        x, y = data
        noise = keras.random.normal(ops.shape(x), stddev=self.noise, seed=self.random)
        with tf.GradientTape() as tape:
            loss = self.update(y, self(x + noise, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return self.get_metrics_result()

    def test_step(self, data: tuple[Any, Any]) -> Any:
        """Evaluates a batch, without noise."""
        x, y = data
        self.update(y, self(x, training=False))
        return self.get_metrics_result()

    def update(self, y: Any, predicted: Any) -> Any:
        """Returns the loss of a batch, the mean over its samples, and tracks its parts."""
        error = ops.mean(ops.square(predicted - y))
        size = ops.mean(ops.abs(predicted))
        loss = error + self.penalty * size
        for part, value in zip(self.parts, (loss, error, size), strict=True):
            part.update_state(value, sample_weight=ops.shape(y)[0])
        return loss


def build_autoencoder(
    num_inputs: int, hidden: list[int], activation: str, noise: float, penalty: float
) -> Autoencoder:
    """Returns layers of decreasing size, the last of which is the code, and the same backwards."""
    inputs = x = layers.Input((num_inputs,))
    for units in hidden[:-1]:
        x = layers.Dense(units, activation)(x)
    x = layers.Dense(hidden[-1], name="code")(x)
    for units in hidden[-2::-1]:
        x = layers.Dense(units, activation)(x)
    model = Autoencoder(inputs, layers.Dense(num_inputs)(x), name="p2b1")
    model.prepare(noise, penalty)
    return model
