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

    `ranks` is how the ranks of a node do so together; see the operation's attributes. Returns the
    time in which this rank neither waited for others nor copied for them, in s; 0 for a single one.
    """
    import keras

    return ops.load().candle_p1_update(
        [_handle(weight) for weight in weights],
        [_handle(state) for states in step.states for state in states],
        list(gradients),
        keras.ops.stack([keras.ops.cast(each, "float32") for each in step.constants]),
        rule=RULES.index(step.rule),
        **{"threads": ops.num_threads()} | ranks,
    )


def _handle(variable: Any) -> Any:
    return variable.handle if hasattr(variable, "handle") else variable.value.handle
