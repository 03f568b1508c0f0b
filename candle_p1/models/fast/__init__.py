"""Faster implementations of Keras layers, optimizers and penalties: same values and gradients.

The classes here take the arguments of Keras's own and have the same weights and state. They compute
as Keras does unless `choose` has selected the fast implementation, which exists for TensorFlow on
CPUs (candle_p1.models.fast.operations).
"""

from __future__ import annotations

KERNELS = ("fast", "plain")
"""The implementations, as named by ``--kernels``; plain is Keras's own."""
STRETCH = 64
"""The number of positions of a short sequence, into which convolutions cut long ones."""
_fast = False


def choose(kind: str, *, on_cpu: bool) -> None:
    """Chooses one of KERNELS for all models that this process builds from now on."""
    import keras

    global _fast
    _fast = kind == "fast" and on_cpu and keras.backend.backend() == "tensorflow"


def are_fast() -> bool:
    """Returns whether the fast implementation is used."""
    return _fast
