"""Initial weights that are drawn once.

Before TensorFlow executes a function, it computes what does not depend on the function's arguments
(constant folding). Random weights do not, as their seed is a constant. The result is then thrown
away, because it is too large to be kept in the function, and drawn again.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDING = "constant_folding"


def drawn_once(initializer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an initializer with the same values, which are computed by a function of TensorFlow.

    Args:
        initializer: Takes the shape and the dtype.
    """

    def draw(shape: Any, dtype: Any = None) -> Any:
        with _without_folding():
            return initializer(shape, dtype)

    return draw


@contextmanager
def _without_folding() -> Iterator[None]:
    before = tf.config.optimizer.get_experimental_options().get(FOLDING)
    tf.config.optimizer.set_experimental_options({FOLDING: False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({FOLDING: before})
