"""Imports Keras in less time than ``import keras`` takes.

Keras imports scikit-learn for its wrappers, and Matplotlib's pyplot to show images, which takes as
long as a third of TensorFlow. These parts of Keras are therefore imported when something of them is
first used. Python's garbage collector would go through all objects several times while millions of
them are made, none of which is garbage, so it pauses.
"""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec

LATER = frozenset(
    {
        "keras.wrappers",
        "keras._tf_keras.keras.wrappers",
        "keras.src.visualization",
        "keras.visualization",
        "keras._tf_keras.keras.visualization",
    }
)
"""The parts of Keras that are imported when they are first used."""


class _LaterModule(ModuleType):
    """A module that is executed when it is first asked for a name of its own.

    The standard library's LazyLoader would execute it for any attribute, and TensorFlow's AutoGraph
    asks all modules for their ``__file__``.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._execute()
        return object.__getattribute__(self, name)

    def __dir__(self) -> list[str]:
        self._execute()
        return list(self.__dict__)

    def _execute(self) -> None:
        assert self.__spec__ is not None
        with _executing:
            later = self.__spec__.loader
            if not isinstance(later, _LaterLoader):  # this thread executes it, or another one has
                return
            self.__loader__ = self.__spec__.loader = later.loader
            try:
                later.loader.exec_module(self)
            except BaseException:
                self.__loader__ = self.__spec__.loader = later
                raise
            self.__class__ = ModuleType  # type: ignore[assignment]


_executing = threading.RLock()


class _LaterLoader(Loader):
    """Makes modules that another loader executes later."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LaterModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _LaterFinder(MetaPathFinder):
    """Finds the modules of LATER."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in LATER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LaterLoader(spec.loader)
        return spec


def import_keras() -> None:
    """Imports Keras and its backend, unless they have been imported before.

    Raises:
        ImportError: One of them cannot be imported.
    """
    if "keras" in sys.modules:
        return
    finder = _LaterFinder()
    sys.meta_path.insert(0, finder)
    try:
        with _without_collection():
            import keras  # noqa: F401
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collects no garbage in the body; what there is after it is never looked at again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
