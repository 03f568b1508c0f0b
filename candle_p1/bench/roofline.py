"""What a training step costs at least: its roofline bound.

The bound is that of its matrix products and the optimizer's memory traffic, both derived from the
model, at the rates of this machine, which the same job measures with the same threads. Where the
fast kernels need fewer multiplications or update fewer weights, there is a second bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from rich.table import Table

from candle_p1.bench.harness import GIGA, Columns, format_significant, ms, table
from candle_p1.bench.task import seconds_of
from candle_p1.scaling import share_bounds

MATRIX_SIZE = 4096
COPY_BYTES = 1 << 28
REPEATS = 5


def bound(model: Any, batch_size: int, num_threads: int) -> dict[str, float] | None:
    """Returns the shortest possible time of a step, ``total_s``, and what it is derived from.

    ``total_s`` is the bound of the direct form of all products; ``used_total_s`` that of the form
    in use, of whose transforms nothing is counted. None if the operations are not known.
    """
    flops, num_bytes = matrix_product_flops(model, batch_size), optimizer_bytes(model)
    used = matrix_product_flops(model, batch_size, as_computed=True)
    used_bytes = optimizer_bytes(model, as_computed=True)
    if flops is None or used is None:
        return None
    flops_per_s, bytes_per_s = matmul_flops_per_s(), copy_bytes_per_s(num_threads)
    optimizer_s = num_bytes / bytes_per_s
    return {
        "flops": flops,
        "used_flops": used,
        "matmul_flops_per_s": flops_per_s,
        "gemm_s": flops / flops_per_s,
        "optimizer_bytes": num_bytes,
        "copy_bytes_per_s": bytes_per_s,
        "optimizer_s": optimizer_s,
        "total_s": flops / flops_per_s + optimizer_s,
        "used_total_s": used / flops_per_s + used_bytes / bytes_per_s,
    }


def matrix_product_flops(model: Any, batch_size: int, *, as_computed: bool = False) -> float | None:
    """Returns the number of floating-point operations in the matrix products of a step.

    A product of (m, k) and (k, n) has 2 m k n, which the forward pass and the gradients of weights
    and of inputs need each; the inputs of the first layer need no gradient. Counts dense layers and
    convolutions, in the direct form or as the chosen kernels compute them. None if a layer is used
    several times, or the shape of its output is not known.
    """
    import keras

    from candle_p1.models.fast.layers import Conv1D
    from candle_p1.models.fast.tables import TableDense

    kinds = (keras.layers.Dense, *(getattr(keras.layers, f"Conv{n}D") for n in (1, 2, 3)))
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kinds)]
    flops = 0.0
    for i, layer in enumerate(layers):
        try:
            shape = layer.output.shape
        except (AttributeError, ValueError):
            return None
        first = getattr(layer, "data_format", None) == "channels_first"
        positions = shape[2:] if first else shape[1:-1]
        if None in positions:
            return None
        weights = math.prod(layer.kernel.shape)
        if as_computed and isinstance(layer, Conv1D):
            weights = layer.multiplications()
        elif isinstance(layer, TableDense) and not as_computed:
            weights = layer.num_products
        forward = 2.0 * batch_size * math.prod(positions) * weights
        flops += forward * (3 if i else 2)
    return flops


def optimizer_bytes(model: Any, *, as_computed: bool = False) -> int:
    """Returns the bytes an update reads (weights, gradients, state) and writes (weights, state).

    They are those of whole kernels, or of what the chosen kernels update.
    """
    from candle_p1.models.fast.tables import table_layer

    state = [variable for variable in model.optimizer.variables if variable.ndim > 0]
    num_bytes = _num_bytes(model.trainable_weights)
    all_bytes = 3 * num_bytes + 2 * _num_bytes(state)  # without counters
    if not as_computed and (layer := table_layer(model)):
        missing = layer.num_whole * np.dtype(layer.kernel.dtype).itemsize
        missing -= _num_bytes(layer.trainable_weights)
        return all_bytes * (num_bytes + missing) // num_bytes
    return all_bytes


def state_bytes(model: Any) -> int:
    """Returns the bytes of the weights, their gradients and the optimizer's state."""
    gradients = _num_bytes(model.trainable_weights)
    return _num_bytes(model.weights) + gradients + _num_bytes(model.optimizer.variables)


def matmul_flops_per_s() -> float:
    """Returns the rate of float32 matrix products, with the threads the framework uses here."""
    import keras

    random = np.random.default_rng(0).random
    matrix = keras.ops.convert_to_tensor(random((MATRIX_SIZE, MATRIX_SIZE), dtype=np.float32))

    def multiply() -> None:
        product = keras.ops.matmul(matrix, matrix)
        np.asarray(keras.ops.convert_to_numpy(product[0, 0]))  # waits for the product

    return 2.0 * MATRIX_SIZE**3 / seconds_of(multiply, REPEATS)


def copy_bytes_per_s(num_threads: int) -> float:
    """Returns the rate of copying a large array: bytes read plus bytes written."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    parts = [slice(*share_bounds(COPY_BYTES, i, num_threads)) for i in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

        return 2.0 * COPY_BYTES / seconds_of(copy, REPEATS)


def _num_bytes(variables: list[Any]) -> int:
    return sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables)


def render(bound: Mapping[str, float] | None, median_s: float) -> Iterator[str | Table]:
    """Yields what shows a bound beside the median time of a step."""
    number = format_significant
    if bound is None:
        yield "roofline bound: unknown, because the model does not say which products it computes"
    else:
        rows = [{**bound, "form": "direct"}]
        if bound["used_flops"] < bound["flops"]:
            used = {"total_s": bound["used_total_s"], "flops": bound["used_flops"]}
            rows.append({"form": "as computed", **used})
        bounds: Columns = {
            "roofline bound\nof a rank": "form",
            "total\n(ms)": ("total_s", 1e-3),
            "a step takes\n(times as long)": lambda row: median_s / row["total_s"],
            "products\n(GFLOP)": ("flops", GIGA),
            "products\n(ms)": lambda row: ms(row["gemm_s"]) if "gemm_s" in row else "",
        }
        yield table(rows, bounds)
        yield (
            f"at {number(bound['matmul_flops_per_s'] / GIGA)} GFLOP/s, and"
            f" {number(bound['copy_bytes_per_s'] / GIGA)} GB/s, at which the optimizer's"
            f" {number(bound['optimizer_bytes'] / GIGA)} GB take {ms(bound['optimizer_s'])} ms"
        )
