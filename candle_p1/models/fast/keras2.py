"""Optimizers whose formula Keras 3 has changed, with that of Keras 2.

CANDLE runs on tf.keras up to 2.10. Later versions, and tf_keras, have its optimizers under
``optimizers.legacy``; what they call ``optimizers.RMSprop`` and so on computes as Keras 3 does.
SGD, Adam, Adamax and Adadelta compute the same in both. The classes here take the arguments of
Keras 3's and have the same state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
from keras import ops

from candle_p1.models.fast.optimizers import RMSprop, rmsprop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.ops.updates import Update

NADAM_BASE, NADAM_DECAY = 0.96, 0.004
"""The momentum in step t of Nadam is beta_1 (1 - base ** (decay t) / 2). In Keras 3, decay is 1."""


@keras.saving.register_keras_serializable("candle_p1")
class Keras2RMSprop(RMSprop):
    """RMSprop that divides by sqrt(v) + epsilon, where Keras 3 divides by sqrt(v + epsilon).

    With momentum, which standalone Keras 2 does not have and CANDLE does not set, epsilon is under
    the root in tf.keras 2, too.
    """

    def _rule(self, indices: Sequence[int], learning_rate: Any) -> Update | None:
        return rmsprop(self, indices, learning_rate, under_root=False)

    def _keras_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if self.momentum:
            super()._keras_step(gradient, variable, learning_rate)
            return
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = _dense(gradient, variable)
        index = self._get_variable_index(variable)
        square = self._velocities[index]
        self.assign(square, self.rho * square + (1 - self.rho) * ops.square(gradient))
        variance = square
        if self.centered:
            mean = self._average_gradients[index]
            self.assign(mean, self.rho * mean + (1 - self.rho) * gradient)
            variance = square - ops.square(mean)
        self.assign_sub(variable, rate * gradient / (ops.sqrt(variance) + self.epsilon))


@keras.saving.register_keras_serializable("candle_p1")
class Keras2Adagrad(keras.optimizers.Adagrad):  # type: ignore[misc]
    """Adagrad that divides by sqrt(sum) + epsilon, where Keras 3 divides by sqrt(sum + epsilon)."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable and its sum of squares."""
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = _dense(gradient, variable)
        total = self._accumulators[self._get_variable_index(variable)]
        self.assign_add(total, ops.square(gradient))
        self.assign_sub(variable, rate * gradient / (ops.sqrt(total) + self.epsilon))


@keras.saving.register_keras_serializable("candle_p1")
class Keras2Nadam(keras.optimizers.Nadam):  # type: ignore[misc]
    """Nadam whose momentum rises to beta_1 over thousands of steps; in Keras 3, over a hundred.

    Dozat, "Incorporating Nesterov momentum into Adam" (2016), where the decay is 1 / 250.
    """

    def _momentum_of(self, step: Any) -> Any:
        """Returns the momentum of a step, counted from 1."""
        exponent = NADAM_DECAY * ops.cast(step, self._u_product.dtype)
        return self.beta_1 * (1 - 0.5 * ops.power(NADAM_BASE, exponent))

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        self.assign(self._u_product, self._u_product * self._momentum_of(self.iterations + 1))
        # Nadam's own method would multiply by another momentum.
        super(keras.optimizers.Nadam, self)._backend_update_step(
            grads, trainable_variables, learning_rate
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable and its moments."""
        dtype = variable.dtype
        rate, gradient = ops.cast(learning_rate, dtype), _dense(gradient, variable)
        index = self._get_variable_index(variable)
        first, second = self._momentums[index], self._velocities[index]
        self.assign(first, self.beta_1 * first + (1 - self.beta_1) * gradient)
        self.assign(second, self.beta_2 * second + (1 - self.beta_2) * ops.square(gradient))
        now, then = (self._momentum_of(self.iterations + i) for i in (1, 2))
        product = self._u_product
        weight, next_weight = (1 - now) / (1 - product), then / (1 - product * then)
        mean = ops.cast(weight, dtype) * gradient + ops.cast(next_weight, dtype) * first
        beta_2_power = ops.power(ops.cast(self.beta_2, dtype), ops.cast(self.iterations + 1, dtype))
        variance = second / (1 - beta_2_power)
        self.assign_sub(variable, rate * mean / (ops.sqrt(variance) + self.epsilon))


KERAS2_FORMS = {
    keras.optimizers.RMSprop: Keras2RMSprop,
    keras.optimizers.Adagrad: Keras2Adagrad,
    keras.optimizers.Nadam: Keras2Nadam,
}
"""The classes here, by the Keras class they replace."""


def _dense(gradient: Any, variable: Any) -> Any:
    """Returns the gradient as a tensor of the variable's dtype, with zeros where it is sparse."""
    if hasattr(gradient, "indices"):
        gradient = ops.add(gradient, ops.zeros_like(variable))
    return ops.cast(gradient, variable.dtype)
