"""How optimizers update weights in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from candle_p1 import ops

RULES = ("descend", "momentum", "adam", "rmsprop")
"""The formulas, in the order of ``kRules`` in ``source/updates.h``."""


@dataclass(frozen=True)
class Update:
    """One step of an optimizer."""

    rule: str  # one of RULES
    constants: Sequence[Any]  # the numbers in the formula, which source/updates.h names
    states: Sequence[Sequence[Any]] = ()  # variables for its weights, each list in their order


@dataclass(frozen=True, eq=False)
class Factors:
    """The gradient of a kernel of shape (features, units), which an update forms row by row.

    It is transpose(inputs) x upstream + decay x kernel, of inputs that are mostly zeros.

    Attributes:
        places: The row and the column of each value of the inputs: int64, shape (values, 2).
        values: These values, float32.
        upstream: The gradient of the outputs, float32, shape (batch, units).
        decay: By what a penalty on the squares multiplies the kernel: a float32 scalar.
        num_bytes: How many bytes of the factors a rank sends in a step, on average.
    """

    places: Any
    values: Any
    upstream: Any
    decay: Any
    num_bytes: int


def standing_for(gradient: Any) -> Any:
    """Returns a tensor that is there when a gradient is."""
    return gradient.upstream if isinstance(gradient, Factors) else gradient


class FusedOptimizer:
    """An optimizer of Keras that can update float32 weights in one pass over memory."""

    def fused_update(self, variables: Sequence[Any], learning_rate: Any) -> Update | None:
        """Returns how this step updates variables, or None if Keras has to do it."""
        raise NotImplementedError

    def is_fused(self) -> bool:
        """Returns whether a step does nothing but `fused_update` with the gradients."""
        raise NotImplementedError


def update(step: Update, weights: Sequence[Any], gradients: Sequence[Any], **ranks: Any) -> Any:
    """Updates float32 variables of Keras or TensorFlow, and their state.

    Gradients are float32 tensors or `Factors`. `ranks` is how the ranks of a node do so together;
    see the operation's attributes. Returns the time in which this rank neither waited for others
    nor copied for them, in s; 0 for a single one.
    """
    import keras

    factors = [each for each in gradients if isinstance(each, Factors)]
    order = sorted(range(len(weights)), key=lambda i: not isinstance(gradients[i], Factors))
    return ops.load().candle_p1_update(
        [_handle(weights[i]) for i in order],
        [_handle(states[i]) for states in step.states for i in order],
        [standing_for(gradients[i]) for i in order],
        keras.ops.stack([keras.ops.cast(each, "float32") for each in step.constants]),
        [each.places for each in factors],
        [each.values for each in factors],
        [each.decay for each in factors],
        rule=RULES.index(step.rule),
        **{"threads": ops.num_threads()} | ranks,
    )


def _handle(variable: Any) -> Any:
    return variable.handle if hasattr(variable, "handle") else variable.value.handle
