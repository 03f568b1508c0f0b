"""Layers, optimizers and penalties of Keras in a faster form: the same values and gradients.

The classes here take the arguments of Keras's own, hold the same weights and state, and compute as
these do until `choose` has asked for the fast form. There is one for TensorFlow on CPUs; elsewhere
Keras's own is taken. candle_p1.models.fast.operations holds the operations themselves.
"""

from __future__ import annotations

KERNELS = ("fast", "plain")
"""The forms, as ``--kernels`` names them; plain is Keras's own."""
_fast = False


def choose(kind: str, *, on_cpu: bool) -> None:
    """Chooses the form for all models built from now on in this process.

    Args:
        kind: One of KERNELS.
        on_cpu: Whether the model is to run on a CPU.

    """
    import keras

    global _fast
    _fast = kind == "fast" and on_cpu and keras.backend.backend() == "tensorflow"


def are_fast() -> bool:
    """Returns whether the fast form is taken."""
    return _fast
