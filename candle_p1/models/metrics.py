"""Metrics that the benchmarks share. Their states are sums, which can be added up over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

if TYPE_CHECKING:
    from collections.abc import Sequence


@keras.saving.register_keras_serializable("candle_p1")
class Correlation(keras.metrics.Metric):  # type: ignore[misc]
    """Pearson's correlation of the true and predicted values of all samples."""

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
