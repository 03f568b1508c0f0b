"""Faster implementations of Keras layers, optimizers and penalties: same values and gradients.

The classes here take the arguments of Keras's own and have the same weights and state. They compute
as Keras does unless `choose` has selected a fast implementation: that for TensorFlow on CPUs
(candle_p1.models.fast.operations) or that for JAX on GPUs (candle_p1.models.fast.gpu_forms). Rows
of tables (candle_p1.models.fast.tables) have a fast form on CPUs with either.
"""

from __future__ import annotations

import re
from typing import Any

KERNELS = ("fast", "plain")
"""The implementations, as named by ``--kernels``; plain is Keras's own."""
CHUNK = 64
"""The number of positions of a short sequence, into which convolutions cut long ones."""
HALF_TYPES = ("float16", "bfloat16")
"""The types of mixed precision, in which Keras's own layers compute."""
BASIS = re.compile(r"(.*)basis_(\d+)")
"""The name of a constant of candle_p1.models.fast.tables, with the number of its first input."""
_fast = ""
_has_tables = False
_used: set[str] = set()


def choose(kind: str, *, on_cpu: bool) -> None:
    """Chooses one of KERNELS for all models that this process builds from now on."""
    global _fast, _has_tables
    _used.clear()
    _has_tables = kind == "fast" and on_cpu
    has_fast = kind == "fast" and exist(on_cpu=on_cpu)
    _fast = ("cpu" if on_cpu else "gpu") if has_fast else ""


def exist(*, on_cpu: bool) -> bool:
    """Returns whether there is a fast implementation for Keras's backend and this device."""
    import keras

    return bool(keras.backend.backend() == ("tensorflow" if on_cpu else "jax"))


def note(name: str) -> None:
    """Notes that a layer or optimizer of this name computes by its fast implementation."""
    _used.add(name)


def used() -> list[str]:
    """Returns the names noted since the last choice."""
    return sorted(_used)


def are_fast() -> bool:
    """Returns whether a fast implementation is used."""
    return bool(_fast)


def on_cpu() -> bool:
    """Returns whether the implementation for TensorFlow on CPUs is used."""
    return _fast == "cpu"


def on_gpu() -> bool:
    """Returns whether the implementation for JAX on GPUs is used."""
    return _fast == "gpu"


def has_tables() -> bool:
    """Returns whether layers may compute with tables in place of their rows."""
    return _has_tables


def keras_name(optimizer: Any) -> str:
    """Returns the name of Keras's own class of an optimizer, such as SGD."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    own = (cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("keras."))
    return next(own).__name__
