"""Keras's optimizers, in the form that candle_p1.models.fast has chosen.

Keras writes an update as a dozen operations, each of which goes through all weights; TensorFlow has
operations that do the whole in one or few passes. Settings and state are Keras's own. What is
seldom used (sparse gradients, Nesterov momentum, the centered and the amsgrad variants) is left to
Keras.
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
        if not _suits(gradient, variable) or self.nesterov:
            super().update_step(gradient, variable, learning_rate)
            return
        from candle_p1.models.fast import operations

        momentum = self.momentums[self._get_variable_index(variable)] if self.momentum else None
        operations.descend(variable, gradient, learning_rate, momentum, self.momentum)


@keras.saving.register_keras_serializable("candle_p1")
class Adam(keras.optimizers.Adam):  # type: ignore[misc]
    """Adam (Kingma and Ba, arXiv:1412.6980)."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable and its moments."""
        if not _suits(gradient, variable) or self.amsgrad:
            super().update_step(gradient, variable, learning_rate)
            return
        from candle_p1.models.fast import operations

        index = self._get_variable_index(variable)
        operations.adam(
            variable,
            gradient,
            learning_rate,
            moments=(self._momentums[index], self._velocities[index]),
            decays=(self.beta_1, self.beta_2),
            epsilon=self.epsilon,
            step=self.iterations + 1,
        )


@keras.saving.register_keras_serializable("candle_p1")
class RMSprop(keras.optimizers.RMSprop):  # type: ignore[misc]
    """RMSprop. Its fast form has no momentum, and float32."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable and its mean square."""
        simple = not (self.centered or self.momentum) and variable.dtype == "float32"
        if not (_suits(gradient, variable) and simple):
            super().update_step(gradient, variable, learning_rate)
            return
        from candle_p1.models.fast import operations

        index = self._get_variable_index(variable)
        operations.rmsprop(
            variable,
            gradient,
            learning_rate,
            mean_square=self._velocities[index],
            decay=self.rho,
            epsilon=self.epsilon,
        )


FORMS = {
    keras.optimizers.SGD: SGD,
    keras.optimizers.Adam: Adam,
    keras.optimizers.RMSprop: RMSprop,
}
"""The classes here, by Keras's own."""


def _suits(gradient: Any, variable: Any) -> bool:
    """Returns whether there is a fast form for this gradient."""
    is_sparse = hasattr(gradient, "indices")
    return fast.are_fast() and not is_sparse and gradient.dtype == variable.dtype
