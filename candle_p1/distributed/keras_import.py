"""Imports Keras in less time than ``import keras`` takes.

Keras imports scikit-learn for its wrappers, and Matplotlib's pyplot to show images, which takes as
long as a third of TensorFlow. These parts of Keras are therefore imported when something of them is
first used. Python's garbage collector would go through all objects several times while millions of
them are made, none of which is garbage, so it pauses.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

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


class _LaterFinder(MetaPathFinder):
    """Finds the modules of LATER, as those that are executed at the first use of an attribute."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in LATER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
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
