"""Operations of our own for TensorFlow, in C++.

They are registered through TensorFlow's C interface, so they are compiled without TensorFlow and
serve every version of it. Their code is in ``source/``.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any


@cache
def load() -> Any:
    """Returns a module of functions: ``candle_p1_add_scaled``, ``…_clock`` and ``…_rmsprop``."""
    import tensorflow as tf

    return tf.load_op_library(str(files("candle_p1.ops").joinpath("operations.so")))


def read_clock(after: Any) -> Any:
    """Returns what time.perf_counter shows once a tensor is there; float64, in s.

    For tensors on the CPU: of others TensorFlow would make a copy there.
    """
    return load().candle_p1_clock(after)


def add_scaled(values: Any, others: Any, factor: Any) -> Any:
    """Returns values + factor x others, in the memory of the values unless they are still needed.

    Args:
        values: Float32, on the CPU.
        others: Of the same shape and dtype.
        factor: A scalar tensor of float32.
    """
    return load().candle_p1_add_scaled(values, others, factor, threads=_threads())


def apply_rmsprop(
    variable: Any,
    mean_square: Any,
    gradient: Any,
    *,
    rate: Any,
    decay: float,
    epsilon: float,
) -> None:
    """Moves a variable as RMSprop without momentum does, reading and writing each value once.

    Args:
        variable: The handle of a ``tf.Variable`` of float32 on the CPU.
        mean_square: The handle of its mean square.
        gradient: Float32, of the same shape.
        rate: The learning rate, a scalar tensor of float32.
        decay: Of the mean square.
        epsilon: Is added to the mean square under the root.
    """
    load().candle_p1_rmsprop(
        variable,
        mean_square,
        gradient,
        rate,
        decay=decay,
        epsilon=epsilon,
        threads=_threads(),
    )


def _threads() -> int:
    import tensorflow as tf

    return max(1, int(tf.config.threading.get_intra_op_parallelism_threads()))
