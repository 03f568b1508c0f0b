"""Keras optimizers, in the implementation chosen in candle_p1.models.fast.

Keras expresses an update as a dozen operations, each of which goes through all weights; TensorFlow
has operations that do the same in one or a few passes. Settings and state are Keras's own. Rarely
used features (sparse gradients, Nesterov momentum, the centered and amsgrad variants) are left to
Keras. The formulas are those of Keras 3; candle_p1.models.fast.keras2 has those of Keras 2.
"""

from __future__ import annotations

from typing import Any

import keras

from candle_p1.models import fast


@keras.saving.register_keras_serializable("candle_p1")
class SGD(keras.optimizers.SGD):  # type: ignore[misc]
    """Gradient descent, with or without momentum."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable, and its momentum."""
        if not can_be_fast(gradient, variable) or self.nesterov:
            super().update_step(gradient, variable, learning_rate)
            return
        from candle_p1.models.fast import operations

        operations.descend(self, variable, gradient, learning_rate)


@keras.saving.register_keras_serializable("candle_p1")
class Adam(keras.optimizers.Adam):  # type: ignore[misc]
    """Adam (Kingma and Ba, arXiv:1412.6980)."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable and its moments."""
        if not can_be_fast(gradient, variable) or self.amsgrad:
            super().update_step(gradient, variable, learning_rate)
            return
        from candle_p1.models.fast import operations

        operations.adam(self, variable, gradient, learning_rate)


@keras.saving.register_keras_serializable("candle_p1")
class RMSprop(keras.optimizers.RMSprop):  # type: ignore[misc]
    """RMSprop. The fast implementation is for float32 and no momentum."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable and its mean square."""
        simple = not (self.centered or self.momentum) and variable.dtype == "float32"
        if not (can_be_fast(gradient, variable) and simple):
            super().update_step(gradient, variable, learning_rate)
            return
        from candle_p1.models.fast import operations

        operations.rmsprop(self, variable, gradient, learning_rate, under_root=True)


FORMS = {
    keras.optimizers.SGD: SGD,
    keras.optimizers.Adam: Adam,
    keras.optimizers.RMSprop: RMSprop,
}
"""The classes here, by the Keras class they replace."""


def can_be_fast(gradient: Any, variable: Any) -> bool:
    """Returns whether the fast implementation can take this gradient."""
    is_sparse = hasattr(gradient, "indices")
    return fast.are_fast() and not is_sparse and gradient.dtype == variable.dtype
