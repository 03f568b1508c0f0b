"""What a training step cannot be faster than: matrix products and the optimizer's memory traffic.

Both are counted from the model and divided by what this machine reaches, measured in the same job
with the same threads.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from collections.abc import Callable

MATRIX_SIZE = 4096
COPY_BYTES = 1 << 28
REPEATS = 5


def matrix_product_flops(model: Any, batch_size: int) -> float:
    """Returns the floating-point operations of the matrix products of a step.

    A product of (m, k) and (k, n) has 2 m k n. Forward, and backward to weights and to inputs, each
    have the same number; the inputs of the first layer need no gradient. Counted are dense layers
    and convolutions.
    """
    import keras

    layers = [
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.Dense | keras.layers.Conv1D)
    ]
    flops = 0.0
    for i, layer in enumerate(layers):
        positions = layer.output.shape[1] if isinstance(layer, keras.layers.Conv1D) else 1
        forward = 2.0 * batch_size * positions * int(np.prod(layer.kernel.shape))
        flops += forward * (3 if i else 2)
    return flops


def optimizer_bytes(model: Any) -> int:
    """Returns what an update has to read (weights, gradients, state) and write (weights, state)."""
    weights = _num_bytes(model.trainable_weights)
    return 3 * weights + 2 * _num_bytes(_states(model.optimizer))


def state_bytes(model: Any) -> int:
    """Returns what weights, their gradients and the optimizer's state take."""
    gradients = _num_bytes(model.trainable_weights)
    return _num_bytes(model.weights) + gradients + _num_bytes(model.optimizer.variables)


def matmul_flops_per_s() -> float:
    """Returns what products of float32 matrices reach, by the threads the framework has here."""
    import keras

    random = np.random.default_rng(0)
    shape = (MATRIX_SIZE, MATRIX_SIZE)
    matrix = keras.ops.convert_to_tensor(random.random(shape, dtype=np.float32))

    def multiply() -> None:
        product = keras.ops.matmul(matrix, matrix)
        np.asarray(keras.ops.convert_to_numpy(product[0, 0]))  # waits for it

    return 2.0 * MATRIX_SIZE**3 / _median_s(multiply)


def copy_bytes_per_s(num_threads: int) -> float:
    """Returns what copies of a large array reach: bytes read and bytes written."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    parts = [slice(*share_bounds(COPY_BYTES, i, num_threads)) for i in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

        return 2.0 * COPY_BYTES / _median_s(copy)


def _median_s(work: Callable[[], None]) -> float:
    work()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _states(optimizer: Any) -> list[Any]:
    """Returns the state that the algorithm needs: not the counters."""
    return [variable for variable in optimizer.variables if variable.ndim > 0]


def _num_bytes(variables: list[Any]) -> int:
    return sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables)
