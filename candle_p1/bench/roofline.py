"""The roofline bound of a training step: its matrix products and the optimizer's memory traffic.

Both are derived from the model, and divided by the rates of this machine, which the same job
measures with the same threads. Where the fast kernels compute a convolution by fewer
multiplications, there is a second bound, that of the form in use.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from candle_p1.bench.harness import GIGA, format_significant, ms
from candle_p1.bench.task import Reduce, seconds_of
from candle_p1.models.fast.convolution_costs import Rates
from candle_p1.scaling import share_bounds

MATRIX_SIZE = 4096
SMALLER_MATRIX_SIZE = 2048
"""For rates that are measured several times."""
COPY_BYTES = 1 << 28
REPEATS = 5


def bound(model: Any, batch_size: int, num_threads: int) -> dict[str, float] | None:
    """Returns the shortest possible time of a step, ``total_s``, and what it is derived from.

    ``total_s`` is the bound of the direct form of all products; ``used_total_s`` that of the form
    in use, of whose transforms between sequences and spectra nothing is counted. Returns None if
    the number of operations is not known.
    """
    flops, num_bytes = matrix_product_flops(model, batch_size), optimizer_bytes(model)
    used = matrix_product_flops(model, batch_size, as_computed=True)
    if flops is None or used is None:
        return None
    flops_per_s, bytes_per_s = matmul_flops_per_s(), copy_bytes_per_s(num_threads)
    return {
        "used_flops": used,
        "used_total_s": used / flops_per_s + num_bytes / bytes_per_s,
        "flops": flops,
        "matmul_flops_per_s": flops_per_s,
        "gemm_s": flops / flops_per_s,
        "optimizer_bytes": num_bytes,
        "copy_bytes_per_s": bytes_per_s,
        "optimizer_s": num_bytes / bytes_per_s,
        "total_s": flops / flops_per_s + num_bytes / bytes_per_s,
    }


def matrix_product_flops(model: Any, batch_size: int, *, as_computed: bool = False) -> float | None:
    """Returns the number of floating-point operations in the matrix products of a step.

    A product of (m, k) and (k, n) has 2 m k n operations. The forward pass and the gradients of
    weights and of inputs have the same number each; the inputs of the first layer need no gradient.
    Only dense layers and convolutions are counted, each as used once. None if the shape of their
    outputs is not known, as in a model that is a class of its own. Counts the direct form, or what
    the chosen kernels compute.
    """
    import keras

    from candle_p1.models.fast.layers import Conv1D

    kinds = (keras.layers.Dense, *(getattr(keras.layers, f"Conv{n}D") for n in (1, 2, 3)))
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kinds)]
    flops = 0.0
    for i, layer in enumerate(layers):
        try:
            shape = layer.output.shape
        except (AttributeError, ValueError):  # used several times, or not within a graph
            return None
        first = getattr(layer, "data_format", None) == "channels_first"
        positions = shape[2:] if first else shape[1:-1]
        if None in positions:
            return None
        weights = math.prod(layer.kernel.shape)
        if as_computed and isinstance(layer, Conv1D):
            weights = layer.multiplications()
        forward = 2.0 * batch_size * math.prod(positions) * weights
        flops += forward * (3 if i else 2)
    return flops


def optimizer_bytes(model: Any) -> int:
    """Returns the bytes an update reads (weights, gradients, state) and writes (weights, state)."""
    state = [variable for variable in model.optimizer.variables if variable.ndim > 0]
    return 3 * _num_bytes(model.trainable_weights) + 2 * _num_bytes(state)  # without counters


def state_bytes(model: Any) -> int:
    """Returns the bytes of the weights, their gradients and the optimizer's state."""
    gradients = _num_bytes(model.trainable_weights)
    return _num_bytes(model.weights) + gradients + _num_bytes(model.optimizer.variables)


def matmul_flops_per_s(size: int = MATRIX_SIZE, of: Reduce = statistics.median) -> float:
    """Returns the rate of float32 matrix products, with the threads the framework uses here."""
    return 2.0 * size**3 / matmul_s((size, size, size), REPEATS, of)


def matmul_s(shape: tuple[int, int, int], num_calls: int, of: Reduce) -> float:
    """Returns the time of a product of float32 matrices, (m, k) by (k, n), in s; see seconds_of."""
    import keras

    m, k, n = shape
    random = np.random.default_rng(0).random
    one = keras.ops.convert_to_tensor(random((m, k), dtype=np.float32))
    other = keras.ops.convert_to_tensor(random((k, n), dtype=np.float32))

    def multiply() -> None:
        product = keras.ops.matmul(one, other)
        np.asarray(keras.ops.convert_to_numpy(product[0, 0]))  # waits for the product

    return seconds_of(multiply, num_calls, of)


def copy_bytes_per_s(num_threads: int, of: Reduce = statistics.median) -> float:
    """Returns the rate of copying a large array: bytes read plus bytes written; see above."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    parts = [slice(*share_bounds(COPY_BYTES, i, num_threads)) for i in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

        return 2.0 * COPY_BYTES / seconds_of(copy, REPEATS, of)


def fastest_rates(num_threads: int) -> Rates:
    """Returns the rates of the fastest of some calls, which the costs of convolutions refer to."""
    return Rates(matmul_flops_per_s(SMALLER_MATRIX_SIZE, min), copy_bytes_per_s(num_threads, min))


def _num_bytes(variables: list[Any]) -> int:
    return sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables)


def describe(bound: Mapping[str, float] | None, median_s: float) -> str:
    """Returns a sentence on a bound, as `bound` returns it, and the median time of a step."""
    if bound is None:
        return (
            "roofline bound: not known, because the model does not say which products it computes"
        )
    number = format_significant
    text = (
        f"roofline bound of a rank: {ms(bound['total_s'])} ms, of which matrix products take"
        f" {ms(bound['gemm_s'])} ms ({number(bound['flops'] / GIGA)} GFLOP at"
        f" {number(bound['matmul_flops_per_s'] / GIGA)} GFLOP/s) and the optimizer's memory traffic"
        f" {ms(bound['optimizer_s'])} ms ({number(bound['optimizer_bytes'] / GIGA)} GB at"
        f" {number(bound['copy_bytes_per_s'] / GIGA)} GB/s);"
        f" a step takes {number(median_s / bound['total_s'])} times as long"
    )
    if bound["used_flops"] < bound["flops"]:
        text += (
            f". With tiled convolutions ({number(bound['used_flops'] / GIGA)} GFLOP) the bound is"
            f" {ms(bound['used_total_s'])} ms, and a step takes"
            f" {number(median_s / bound['used_total_s'])} times as long"
        )
    return text
