"""Layers and metrics that the benchmarks share and that Keras 3 does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops


@keras.saving.register_keras_serializable("candle_p1")
class LocallyConnected1D(keras.layers.Layer):  # type: ignore[misc]
    """A 1D convolution whose kernel is not shared: each output position has its own.

    Keras 2 had this layer, and Keras 3 has dropped it. Input shape (batch, length, channels),
    output shape (batch, positions, filters). There are positions x (kernel_size x channels + 1) x
    filters parameters, so it suits short inputs or large strides. The arguments are as for Conv1D.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int,
        strides: int = 1,
        activation: Any = None,
        kernel_initializer: Any = "glorot_uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.filters, self.kernel_size, self.strides = filters, kernel_size, strides
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the kernel (positions, kernel_size x channels, filters) and the bias."""
        positions = self.compute_output_shape(input_shape)[1]
        _, _, channels = input_shape
        assert channels is not None
        self.kernel = self.add_weight(
            shape=(positions, self.kernel_size * channels, self.filters),
            initializer=self.kernel_initializer,
            name="kernel",
        )
        self.bias = self.add_weight(
            shape=(positions, self.filters), initializer="zeros", name="bias"
        )

    def call(self, inputs: Any) -> Any:
        """Multiplies each window by its kernel."""
        positions = self.kernel.shape[0]
        last = (positions - 1) * self.strides + 1
        windows = ops.concatenate(
            [inputs[:, i : i + last : self.strides] for i in range(self.kernel_size)], axis=-1
        )
        outputs = ops.einsum("bpi,pif->bpf", windows, self.kernel) + self.bias
        return self.activation(outputs)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[Any, ...]:
        """Returns (batch, positions, filters)."""
        batch, length, _ = input_shape
        assert length is not None
        return batch, (length - self.kernel_size) // self.strides + 1, self.filters


@keras.saving.register_keras_serializable("candle_p1")
class SampleNormal(keras.layers.Layer):  # type: ignore[misc]
    """The latent sample of a variational autoencoder, by the reparametrisation trick.

    Takes the mean and the logarithm of the variance, each of shape (batch, latent). Returns mean +
    exp(log variance / 2) x noise in training, and otherwise the mean, so that evaluations are
    reproducible. Adds the Kullback-Leibler divergence from the unit normal, summed over latent
    dimensions, averaged over the batch and times `kl_weight`, to the loss: Kingma and Welling,
    "Auto-Encoding Variational Bayes" (arXiv:1312.6114), appendix B.

    Args:
        stddev: The standard deviation of the noise.
        kl_weight: The weight of the divergence in the loss.
    """

    def __init__(self, stddev: float = 1.0, kl_weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stddev, self.kl_weight = stddev, kl_weight
        self.seed_generator = keras.random.SeedGenerator()

    def call(self, inputs: tuple[Any, Any], training: bool = False) -> Any:
        """Draws the sample."""
        mean, log_variance = inputs
        divergence = -0.5 * ops.sum(
            1 + log_variance - ops.square(mean) - ops.exp(log_variance), axis=-1
        )
        self.add_loss(self.kl_weight * ops.mean(divergence))
        if not training:
            return mean
        noise = keras.random.normal(
            ops.shape(mean), stddev=self.stddev, dtype=mean.dtype, seed=self.seed_generator
        )
        return mean + ops.exp(log_variance / 2) * noise

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the mean."""
        return input_shape[0]


@keras.saving.register_keras_serializable("candle_p1")
class ActivityL2(keras.layers.Layer):  # type: ignore[misc]
    """Passes its input on, and penalizes its squares: their sum, averaged over the batch.

    This is the activity regularizer l2 of Keras 2. In Keras 3 it depends on the release whether a
    layer divides by the batch size what its activity regularizer returns.
    """

    def __init__(self, weight: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weight = weight

    def call(self, inputs: Any) -> Any:
        """Adds the penalty to the loss."""
        squares = ops.sum(ops.square(ops.cast(inputs, keras.config.floatx())), axis=-1)
        self.add_loss(self.weight * ops.mean(squares))
        return inputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the input's shape."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "weight": self.weight}


@keras.saving.register_keras_serializable("candle_p1")
class NoiseOnColumns(keras.layers.Layer):  # type: ignore[misc]
    """Adds normal noise to columns of the input, from `first` up to before `stop`, in training.

    The input's shape is (batch, columns).
    """

    def __init__(self, stddev: float, first: int, stop: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stddev, self.first, self.stop = stddev, first, stop
        self.seed_generator = keras.random.SeedGenerator()

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Adds the noise."""
        if not training:
            return inputs
        columns = inputs[:, self.first : self.stop]
        noise = keras.random.normal(
            ops.shape(columns), stddev=self.stddev, dtype=columns.dtype, seed=self.seed_generator
        )
        return ops.concatenate(
            [inputs[:, : self.first], columns + noise, inputs[:, self.stop :]], axis=1
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the input's shape."""
        return input_shape


@keras.saving.register_keras_serializable("candle_p1")
class Correlation(keras.metrics.Metric):  # type: ignore[misc]
    """Pearson's correlation of the true and predicted values of all samples.

    Its state, like that of the other metrics, is sums, which can be added up over ranks.
    """

    def __init__(self, name: str = "correlation", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.sums = self.add_variable(shape=(6,), initializer="zeros", name="sums")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch, shape (samples, …); each sample counts as the mean of its values."""
        t, p = ops.cast(y_true, self.dtype), ops.cast(y_pred, self.dtype)
        t, p = (ops.reshape(values, (ops.shape(values)[0], -1)) for values in (t, p))
        products = (ops.ones_like(t), t, p, t * t, p * p, t * p)
        self.sums.assign_add(ops.stack([ops.sum(ops.mean(each, axis=1)) for each in products]))

    def result(self) -> Any:
        """Returns the correlation; 0 if the true or the predicted values do not vary."""
        n, t, p, t2, p2, tp = ops.unstack(self.sums / ops.maximum(self.sums[0], 1))
        variances = ops.maximum((t2 - t * t) * (p2 - p * p), 0)
        return n * (tp - t * p) / (ops.sqrt(variances) + keras.config.epsilon())


@keras.saving.register_keras_serializable("candle_p1")
class CutoffAccuracy(keras.metrics.Mean):  # type: ignore[misc]
    """The share of values that are predicted on the right side of all cutoffs."""

    def __init__(self, cutoffs: Sequence[float], name: str = "accuracy", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.cutoffs = list(cutoffs)
        bounds = np.asarray(self.cutoffs, np.float64)
        rounded = bounds.astype(np.float32)
        # Rounded up, so that values of float32 compare as with the cutoffs themselves.
        self.bounds = np.where(rounded < bounds, np.nextafter(rounded, np.float32(np.inf)), rounded)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of values."""
        t, p = (ops.reshape(ops.cast(v, "float32"), (-1, 1)) for v in (y_true, y_pred))
        bounds = ops.reshape(ops.convert_to_tensor(self.bounds, "float32"), (1, -1))
        same = ops.all(ops.equal(t >= bounds, p >= bounds), axis=1)
        super().update_state(ops.cast(same, "float32"))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "cutoffs": self.cutoffs}
