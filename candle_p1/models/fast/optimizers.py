"""Keras optimizers, in the implementation chosen in candle_p1.models.fast.

Keras expresses an update as a dozen operations, each of which goes through all weights. Here one
operation (candle_p1.ops.updates) does the same in one pass. Settings and state are Keras's own.
Rarely used features (sparse gradients, Nesterov momentum, the centered and amsgrad variants) and
types other than float32 are left to Keras.

The formulas are those of Keras 3. Classes named Keras2 are optimizers whose formula it has changed,
with that of Keras 2. CANDLE runs on tf.keras up to 2.10. Later versions, and tf_keras, have its
optimizers under ``optimizers.legacy``; what they call ``optimizers.RMSprop`` and so on computes as
Keras 3 does. SGD, Adam, Adamax and Adadelta compute the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from candle_p1.models import fast
from candle_p1.ops.updates import Factors, FusedOptimizer, Update, update

NADAM_BASE, NADAM_DECAY = 0.96, 0.004
"""The momentum in step t of Nadam is beta_1 (1 - base ** (decay t) / 2). In Keras 3, decay is 1."""


class Fused(FusedOptimizer, keras.optimizers.Optimizer):  # type: ignore[misc]
    """What the optimizers here have in common."""

    def fused_update(self, variables: Sequence[Any], learning_rate: Any) -> Update | None:
        """Returns how this step updates variables, or None if Keras has to do it."""
        if not fast.on_cpu() or type(self).update_step is not Fused.update_step:
            return None
        if any(keras.backend.standardize_dtype(each.dtype) != "float32" for each in variables):
            return None
        indices = [self._get_variable_index(variable) for variable in variables]
        rule = self._rule(indices, learning_rate)
        if rule is not None:
            fast.note(fast.keras_name(self))
        return rule

    def is_fused(self) -> bool:
        """Returns whether a step does nothing but `fused_update` with the gradients."""
        changed = self.clipnorm, self.clipvalue, self.global_clipnorm
        changes = any(changed) or self.gradient_accumulation_steps
        return not changes and self.fused_update(self._trainable_variables, 0.0) is not None

    def _rule(self, indices: Sequence[int], learning_rate: Any) -> Update | None:
        """Returns the update of the variables with these indices, or None."""
        raise NotImplementedError

    def _backend_update_step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any
    ) -> None:
        """Updates variables by `Factors`, and lets Keras do so by tensors."""
        by_tensors = []
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            if isinstance(gradient, Factors):
                step = self.fused_update([variable], learning_rate)
                assert step is not None
                update(step, [variable], [gradient])
            else:
                by_tensors.append((gradient, variable))
        if by_tensors:
            super()._backend_update_step(*map(list, zip(*by_tensors, strict=True)), learning_rate)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable, and its state."""
        is_sparse = hasattr(gradient, "indices")
        step = None if is_sparse else self.fused_update([variable], learning_rate)
        if step is None or gradient.dtype != variable.dtype:
            self._keras_step(gradient, variable, learning_rate)
        else:
            update(step, [variable], [gradient])

    def _keras_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)


@keras.saving.register_keras_serializable("candle_p1")
class SGD(Fused, keras.optimizers.SGD):  # type: ignore[misc]
    """Gradient descent, with or without momentum."""

    def _rule(self, indices: Sequence[int], learning_rate: Any) -> Update | None:
        if self.nesterov:
            return None
        if not self.momentum:
            return Update("descend", (learning_rate,))
        velocities = [self.momentums[index] for index in indices]
        return Update("momentum", (learning_rate, self.momentum), (velocities,))


@keras.saving.register_keras_serializable("candle_p1")
class Adam(Fused, keras.optimizers.Adam):  # type: ignore[misc]
    """Adam (Kingma and Ba, arXiv:1412.6980)."""

    def _rule(self, indices: Sequence[int], learning_rate: Any) -> Update | None:
        if self.amsgrad:
            return None
        step = ops.cast(self.iterations + 1, "float32")
        corrections = [
            1 - ops.power(ops.cast(beta, "float32"), step) for beta in (self.beta_1, self.beta_2)
        ]
        rate = learning_rate * ops.sqrt(corrections[1]) / corrections[0]
        states = [[all_of[i] for i in indices] for all_of in (self._momentums, self._velocities)]
        return Update("adam", (rate, self.beta_1, self.beta_2, self.epsilon), states)


@keras.saving.register_keras_serializable("candle_p1")
class RMSprop(Fused, keras.optimizers.RMSprop):  # type: ignore[misc]
    """RMSprop; in one pass where it is not centered and has no momentum."""

    _adds_under_root = True  # epsilon, to the mean square; Keras 2 adds it to the root

    def _rule(self, indices: Sequence[int], learning_rate: Any) -> Update | None:
        if self.centered or self.momentum:
            return None
        epsilons = (self.epsilon, 0) if self._adds_under_root else (0, self.epsilon)
        squares = [self._velocities[index] for index in indices]
        return Update("rmsprop", (learning_rate, self.rho, *epsilons), (squares,))


FORMS = {
    keras.optimizers.SGD: SGD,
    keras.optimizers.Adam: Adam,
    keras.optimizers.RMSprop: RMSprop,
}
"""The classes with Keras 3's formulas, by the Keras class they replace."""


@keras.saving.register_keras_serializable("candle_p1")
class Keras2RMSprop(RMSprop):
    """RMSprop that divides by sqrt(v) + epsilon, where Keras 3 divides by sqrt(v + epsilon).

    With momentum, which standalone Keras 2 does not have and CANDLE does not set, epsilon is under
    the root in tf.keras 2, too.
    """

    _adds_under_root = False

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
"""Those with Keras 2's formulas."""


def _dense(gradient: Any, variable: Any) -> Any:
    """Returns the gradient as a tensor of the variable's dtype, with zeros where it is sparse."""
    if hasattr(gradient, "indices"):
        gradient = ops.add(gradient, ops.zeros_like(variable))
    return ops.cast(gradient, variable.dtype)
