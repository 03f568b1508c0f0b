"""The engines there are, and Keras: its backend, decided before it is imported, and its import.

Keras imports scikit-learn for its wrappers, and Matplotlib's pyplot to show images, which takes as
long as a third of TensorFlow. These parts of Keras are therefore imported when something of them is
first used. Python's garbage collector would go through all objects several times while millions of
them are made, none of which is garbage, so it pauses.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from candle_p1.errors import SetupError

VARIABLE = "KERAS_BACKEND"
"""Tells Keras its backend, when it is imported."""
AUTO = "auto"


class EngineKind(NamedTuple):
    """What must be known of an engine before it is imported."""

    backend: str  # Keras's
    extras: tuple[str, str]  # of this package that install it for CPUs and for NVIDIA GPUs
    set_up: str  # the command that installs it in a checkout


ENGINES = {
    "horovod": EngineKind("tensorflow", ("cpu", "gpu"), "make setup"),
    "jax": EngineKind("jax", ("jax-mpi", "jax-gpu"), "make setup ENGINE=jax"),
}
"""The engines by name; see `candle_p1.distributed.engine`."""
BACKENDS = tuple(kind.backend for kind in ENGINES.values())
LATER = {"keras.src.visualization"} | {
    f"{keras}.{part}"
    for keras in ("keras", "keras._tf_keras.keras")
    for part in ("wrappers", "visualization")
}
"""The parts of Keras that are imported when they are first used."""


def choose_backend(engine: str = AUTO) -> str:
    """Returns Keras's backend, "tensorflow" or "jax", and sets KERAS_BACKEND to it.

    Nothing is imported. With "auto", what the user chose by KERAS_BACKEND or by importing Keras
    holds; otherwise, TensorFlow is taken where it is installed, and JAX where TensorFlow is not.
    Where neither is, the answer is "tensorflow", whose import then fails. Keras's own file
    (~/.keras/keras.json) does not count: Keras writes it when it is first imported, so that what it
    says need not be the choice of anyone.

    Raises:
        SetupError: KERAS_BACKEND, or a Keras that is already imported, contradicts the engine or
            each other, or KERAS_BACKEND names another backend; or it cannot be imported by this
            Python.
    """
    told, keras = os.environ.get(VARIABLE) or None, sys.modules.get("keras")
    imported = None if keras is None else str(keras.backend.backend())
    for name, where in ((told, f"{VARIABLE} is"), (imported, "Keras is already imported with")):
        if name is not None and name not in BACKENDS:
            raise SetupError(
                f"{where} {name}, which is not supported: set {VARIABLE} to {' or '.join(BACKENDS)}"
            )
    if engine != AUTO and told not in (None, ENGINES[engine].backend):
        raise SetupError(
            f"the engine {engine} computes with {ENGINES[engine].backend}, but {VARIABLE} is"
            f" {told}: unset {VARIABLE}, or choose the other engine"
        )
    if engine == AUTO:
        wanted = told or imported or next(filter(find_spec, BACKENDS), "tensorflow")
    else:
        wanted = ENGINES[engine].backend
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


class _LaterModule(ModuleType):
    """Takes a module's place until somebody asks for a name in it, and then imports it.

    The standard library's LazyLoader would do so for any attribute, and TensorFlow's AutoGraph asks
    all modules for their ``__file__``.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # for which the import of a part asks
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._module(), name)

    def __dir__(self) -> list[str]:
        return dir(self._module())

    def _module(self) -> ModuleType:
        with _replacing:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
        return import_module(self.__name__)


_replacing = threading.Lock()


def import_keras() -> None:
    """Imports Keras and its backend, unless they have been before, or raises ImportError."""
    if "keras" in sys.modules:
        return
    sys.modules.update((name, _LaterModule(name)) for name in LATER)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import keras  # noqa: F401

        gc.freeze()  # what there is now is never looked at again
    finally:
        if was_enabled:
            gc.enable()
