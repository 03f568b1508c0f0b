"""Keras optimizers, in the implementation chosen in candle_p1.models.fast.

Keras expresses an update as a dozen operations, each of which goes through all weights. Here one
operation (candle_p1.ops.updates) does the same in one pass. Settings and state are Keras's own.
Rarely used features (sparse gradients, Nesterov momentum, the centered and amsgrad variants) and
types other than float32 are left to Keras. The formulas are those of Keras 3;
candle_p1.models.fast.keras2 has those of Keras 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from candle_p1.models import fast
from candle_p1.ops.updates import Update

if TYPE_CHECKING:
    from collections.abc import Sequence


class OnePass(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer that can update float32 weights in one pass over memory."""

    def one_pass(self, variables: Sequence[Any], learning_rate: Any) -> Update | None:
        """Returns how this step updates variables, or None if Keras has to do it."""
        if not fast.are_fast() or type(self).update_step is not OnePass.update_step:
            return None
        if any(keras.backend.standardize_dtype(each.dtype) != "float32" for each in variables):
            return None
        indices = [self._get_variable_index(variable) for variable in variables]
        rule = self._rule(indices, learning_rate)
        if rule is not None:
            fast.note(fast.keras_name(self))
        return rule

    def is_one_pass(self) -> bool:
        """Returns whether a step does nothing but `one_pass` with the gradients."""
        changed = self.clipnorm, self.clipvalue, self.global_clipnorm
        changes = any(changed) or self.gradient_accumulation_steps
        return not changes and self.one_pass(self._trainable_variables, 0.0) is not None

    def _rule(self, indices: Sequence[int], learning_rate: Any) -> Update | None:
        """Returns the update of the variables with these indices, or None."""
        raise NotImplementedError

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable, and its state."""
        update = None if hasattr(gradient, "indices") else self.one_pass([variable], learning_rate)
        if update is None or gradient.dtype != variable.dtype:
            self._keras_step(gradient, variable, learning_rate)
        else:
            update.execute([variable], [gradient])

    def _keras_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable by Keras's operations."""
        super().update_step(gradient, variable, learning_rate)


@keras.saving.register_keras_serializable("candle_p1")
class SGD(OnePass, keras.optimizers.SGD):  # type: ignore[misc]
    """Gradient descent, with or without momentum."""

    def _rule(self, indices: Sequence[int], learning_rate: Any) -> Update | None:
        if self.nesterov:
            return None
        if not self.momentum:
            return Update("descend", (learning_rate,))
        velocities = [self.momentums[index] for index in indices]
        return Update("momentum", (learning_rate, self.momentum), (velocities,))


@keras.saving.register_keras_serializable("candle_p1")
class Adam(OnePass, keras.optimizers.Adam):  # type: ignore[misc]
    """Adam (Kingma and Ba, arXiv:1412.6980)."""

    def _rule(self, indices: Sequence[int], learning_rate: Any) -> Update | None:
        if self.amsgrad:
            return None
        step = keras.ops.cast(self.iterations + 1, "float32")
        corrections = [
            1 - keras.ops.power(keras.ops.cast(beta, "float32"), step)
            for beta in (self.beta_1, self.beta_2)
        ]
        rate = learning_rate * keras.ops.sqrt(corrections[1]) / corrections[0]
        states = [[all_of[i] for i in indices] for all_of in (self._momentums, self._velocities)]
        return Update("adam", (rate, self.beta_1, self.beta_2, self.epsilon), states)


@keras.saving.register_keras_serializable("candle_p1")
class RMSprop(OnePass, keras.optimizers.RMSprop):  # type: ignore[misc]
    """RMSprop; in one pass without momentum."""

    def _rule(self, indices: Sequence[int], learning_rate: Any) -> Update | None:
        return rmsprop(self, indices, learning_rate, under_root=True)


def rmsprop(
    optimizer: Any, indices: Sequence[int], learning_rate: Any, *, under_root: bool
) -> Update | None:
    """Returns an update of RMSprop, or None where it is centered or has momentum.

    Epsilon is added to the mean square under the root (Keras 3) or to the root (Keras 2).
    """
    if optimizer.centered or optimizer.momentum:
        return None
    epsilons = (optimizer.epsilon, 0) if under_root else (0, optimizer.epsilon)
    squares = [optimizer._velocities[index] for index in indices]
    return Update("rmsprop", (learning_rate, optimizer.rho, *epsilons), (squares,))


FORMS = {
    keras.optimizers.SGD: SGD,
    keras.optimizers.Adam: Adam,
    keras.optimizers.RMSprop: RMSprop,
}
"""The classes here, by the Keras class they replace."""
