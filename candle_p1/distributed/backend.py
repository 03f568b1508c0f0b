"""The engines there are, and which backend Keras computes with: decided before it is imported."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import NamedTuple

from candle_p1.errors import SetupError

VARIABLE = "KERAS_BACKEND"
"""Tells Keras its backend, when it is imported."""
AUTO = "auto"


class EngineKind(NamedTuple):
    """What must be known of an engine before it is imported.

    Attributes:
        backend: Keras's backend.
        extras: The extras of this package that install it: for CPUs, and for NVIDIA GPUs.
        set_up: The command that installs it in a checkout.
    """

    backend: str
    extras: tuple[str, str]
    set_up: str


ENGINES = {
    "horovod": EngineKind("tensorflow", ("cpu", "gpu"), "make setup"),
    "jax": EngineKind("jax", ("jax-mpi", "jax-gpu"), "make setup ENGINE=jax"),
}
"""The engines by name: candle_p1.distributed.engines has a module for each."""
BACKENDS = tuple(kind.backend for kind in ENGINES.values())


def choose_backend(engine: str = AUTO) -> str:
    """Returns Keras's backend, "tensorflow" or "jax", and sets KERAS_BACKEND to it.

    Nothing is imported. With "auto", what the user chose by KERAS_BACKEND or by importing Keras
    holds; otherwise, TensorFlow is taken where it is installed, and JAX where TensorFlow is not.
    Where neither is, the answer is "tensorflow", whose import then fails. Keras's own file
    (~/.keras/keras.json) does not count: Keras writes it when it is first imported, so that what it
    says need not be the choice of anyone.

    Args:
        engine: What averages gradients: "horovod", "jax" or "auto".

    Raises:
        SetupError: KERAS_BACKEND, or a Keras that is already imported, contradicts the engine or
            each other, or KERAS_BACKEND names another backend; or it cannot be imported by this
            Python.
    """
    told, imported = os.environ.get(VARIABLE) or None, _imported_backend()
    for name, where in ((told, f"{VARIABLE} is"), (imported, "Keras is already imported with")):
        if name is not None and name not in BACKENDS:
            raise SetupError(
                f"{where} {name}, with which nothing is trained here: set {VARIABLE} to"
                f" {' or '.join(BACKENDS)}"
            )
    if engine != AUTO and told not in (None, ENGINES[engine].backend):
        raise SetupError(
            f"the engine {engine} computes with {ENGINES[engine].backend}, but {VARIABLE} is"
            f" {told}: unset {VARIABLE}, or choose the other engine"
        )
    wanted = told or imported or _installed_backend() if engine == AUTO else ENGINES[engine].backend
    if imported not in (None, wanted):
        why = f"{VARIABLE} is {wanted}" if engine == AUTO else f"the engine {engine} needs {wanted}"
        raise SetupError(
            f"{why}, but Keras is already imported with {imported}: set {VARIABLE}={wanted} before"
            " this program starts"
        )
    if wanted == "tensorflow" and sys.flags.optimize > 1:
        raise SetupError(
            "TensorFlow reads its docstrings, which Python removes (-OO, or PYTHONOPTIMIZE=2): use"
            " -O, or unset PYTHONOPTIMIZE"
        )
    os.environ[VARIABLE] = wanted
    return wanted


def engine_of(backend: str) -> str:
    """Returns the engine of several ranks that train with a backend of Keras."""
    return next(name for name, kind in ENGINES.items() if kind.backend == backend)


def _imported_backend() -> str | None:
    keras = sys.modules.get("keras")
    return None if keras is None else str(keras.backend.backend())


def _installed_backend() -> str:
    return next((name for name in BACKENDS if find_spec(name)), "tensorflow")
