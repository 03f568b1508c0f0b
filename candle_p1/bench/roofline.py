"""What a training step costs: its roofline bound, and a prediction from counts and measured rates.

The bound is that of its matrix products and the optimizer's memory traffic, both derived from the
model, at the rates of this machine, which the same job measures with the same threads. Where the
fast kernels compute a convolution by fewer multiplications, there is a second bound.

A prediction adds what candle_p1.models.fast.convolution_costs says of the algorithms in use; the
dense layers' products, which are timed alone because their rate depends on the shapes; the passes
of the optimizer and of other layers at the rates themselves; and the making of batches, which is
timed, too, since it takes cores from the step. None of it is fitted to the benchmarks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.bench.harness import GIGA, Columns, format_significant, ms, table
from candle_p1.bench.task import Reduce, seconds_of
from candle_p1.models.fast import CHUNK
from candle_p1.models.fast.convolution_costs import FACTORS, Convolution, Rates, choose, seconds
from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from rich.table import Table

    from candle_p1.bench.training import Training

MATRIX_SIZE = 4096
SMALLER_MATRIX_SIZE = 2048  # for rates that are measured several times
COPY_BYTES = 1 << 28
REPEATS = 5
NUM_CALLS = 10  # of a product, of which the fastest counts, as for the rates
MAX_BATCHES = 10  # whose making is timed
FLOAT_BYTES = 4
PLAIN_PASSES = {"SGD": 5, "RMSprop": 23, "Adam": 31}
"""How often Keras's own optimizers read or write an array of the weights' size in an update: SGD
multiplies (2) and subtracts (3), the others do one operation of their formulas after another."""
LAYER_PASSES = 4  # over an output of a layer without weights, forward and backward
BATCH_PASSES = 4  # over a batch of arrays: gathered and then copied to a tensor


def bound(model: Any, batch_size: int, num_threads: int) -> dict[str, float] | None:
    """Returns the shortest possible time of a step, ``total_s``, and what it is derived from.

    ``total_s`` is the bound of the direct form of all products; ``used_total_s`` that of the form
    in use, of whose transforms nothing is counted. None if the operations are not known.
    """
    flops, num_bytes = matrix_product_flops(model, batch_size), optimizer_bytes(model)
    used = matrix_product_flops(model, batch_size, as_computed=True)
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
        "used_total_s": used / flops_per_s + optimizer_s,
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
    """Returns the time of a product of float32 matrices, (m, k) by (k, n), in s."""
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
    """Returns the rate of copying a large array: bytes read plus bytes written."""
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


def batch_s(batches: Iterable[Any]) -> float:
    """Returns how long it takes to make a batch if nothing else is done, in s; 0 for only one."""
    begin, num = 0.0, 0
    for num, _ in enumerate(islice(batches, MAX_BATCHES + 1)):
        if num == 0:  # for which a thread has to start
            begin = time.perf_counter()
    return (time.perf_counter() - begin) / num if num else 0.0


def dense_products_s(model: Any, batch_size: int) -> float:
    """Returns the time of the dense layers' products, each alone, in s: that of the fastest calls.

    They give the outputs and the gradients of kernels and of inputs; the inputs of the first layer
    with weights need no gradient.
    """
    import keras

    total_s, with_weights = 0.0, [layer for layer in model.layers if layer.weights]
    for i, layer in enumerate(with_weights):
        if isinstance(layer, keras.layers.Dense):
            features, units = layer.kernel.shape
            shapes = [(batch_size, features, units), (features, batch_size, units)]
            shapes += [(batch_size, units, features)] * (i > 0)
            total_s += sum(matmul_s(shape, NUM_CALLS, min) for shape in shapes)
    return total_s


def predict(
    model: Any,
    batch_size: int,
    rates: Rates,
    *,
    is_fast: bool,
    dense_s: float,
    batches_s: float | None = None,
) -> dict[str, Any] | None:
    """Returns the predicted time of a step, ``total_s``, its parts, and convolutions' algorithms.

    `is_fast` chooses the fast kernels or Keras's own. The dense layers' products take `dense_s`,
    and making the batch takes `batches_s` from the step; None: it is part of arrays. Returns None
    if the built model has what is not counted: branches, convolutions of another kind, or an
    optimizer that is none of PLAIN_PASSES.
    """
    import keras
    from keras.layers import Flatten, InputLayer, MaxPooling1D, Reshape

    if not isinstance(model, keras.Sequential):
        return None
    convolutions = _convolutions(model, batch_size)
    update_bytes = optimizer_bytes(model) if is_fast else _plain_update_bytes(model)
    if convolutions is None or update_bytes is None:
        return None
    algorithms = {name: _algorithm(of) if is_fast else "plain" for name, of in convolutions.items()}
    # Of the others, some pass their input on, and the work of a pooling is that of a convolution.
    passing = (InputLayer, Reshape, Flatten, MaxPooling1D)
    outputs = [
        math.prod(layer.output.shape[1:])
        for layer in model.layers
        if not layer.weights and not isinstance(layer, passing)
    ]
    float_s = FLOAT_BYTES * batch_size / rates.bytes_per_s
    if batches_s is None:
        batches_s = BATCH_PASSES * float_s * math.prod(model.inputs[0].shape[1:])
    parts = {
        "convolutions_s": sum(
            seconds(algorithms[name], of, rates, FACTORS) for name, of in convolutions.items()
        ),
        "dense_s": dense_s,
        "optimizer_s": update_bytes / rates.bytes_per_s,
        "other_layers_s": sum(LAYER_PASSES * float_s * num for num in outputs),
        "batches_s": batches_s,
    }
    return {**parts, "total_s": sum(parts.values()), "algorithms": algorithms}


def predict_variants(training: Training, model: Any, rates: Rates) -> dict[str, dict[str, Any]]:
    """Returns the predicted steps of a run and of plain Keras, or {} if one cannot be predicted."""
    from candle_p1.models.fast.batches import for_fit

    size = training.plan.batch_size
    # One thread makes batches while the others compute.
    batches_s = batch_s(for_fit(training.batches())) / training.device.threads
    dense_s = dense_products_s(model, size)
    ours = predict(model, size, rates, is_fast=True, dense_s=dense_s, batches_s=batches_s)
    plain = predict(model, size, rates, is_fast=False, dense_s=dense_s)
    return {"candle_p1": ours, "plain Keras": plain} if ours and plain else {}


def _convolutions(model: Any, batch_size: int) -> dict[str, Convolution] | None:
    """Returns the convolutions with the pooling after them, by the layer's name.

    One of a single channel that a convolution by tiles computes once more is part of that one.
    """
    import keras
    from keras.layers import InputLayer, MaxPooling1D

    from candle_p1.models.fast.layers import Conv1D

    layers = [
        layer
        for layer in model.layers
        if not isinstance(layer, InputLayer)
        and not (isinstance(layer, MaxPooling1D) and layer.pool_size == (1,))
    ]
    found: dict[str, Convolution] = {}
    before = ""
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if "conv" not in type(layer).__name__.lower():
            before = ""
            continue
        pool = following.pool_size[0] if isinstance(following, MaxPooling1D) else 1
        of = layer.convolution(pool) if isinstance(layer, Conv1D) else None
        if of is None:
            return None
        of = replace(of, batch=batch_size)
        if before and choose(of) == "tiled" and found[before].channels == 1:
            first = found.pop(before)
            of = replace(of, length=first.length, first_taps=first.taps, gives_gradient=False)
        found[layer.name] = of
        rectifies = layer.activation is keras.activations.relu
        before = layer.name if pool == 1 and rectifies else ""
    return found


def _algorithm(of: Convolution) -> str:
    if of.length < CHUNK + of.taps:
        return "plain"
    return "tiled" if of.first_taps else choose(of)


def _plain_update_bytes(model: Any) -> int | None:
    kinds = {cls.__name__ for cls in type(model.optimizer).__mro__}
    passes = [num for name, num in PLAIN_PASSES.items() if name in kinds]
    return passes[0] * _num_bytes(model.trainable_weights) if passes else None


def compare_prediction(
    fastest_s: Mapping[str, float], predictions: Sequence[Mapping[str, Mapping[str, Any]]]
) -> dict[str, Any] | None:
    """Returns the predicted steps and their ratio beside the measured ones; None without them.

    The model is fitted to times that nothing has disturbed, so the fastest step of a variant is
    compared with the shortest of its predictions, one of each round.
    """
    steps: dict[str, dict[str, Any]] = {}
    for name, measured_s in fastest_s.items():
        if found := [of_round[name] for of_round in predictions if name in of_round]:
            best = min(found, key=lambda each: each["total_s"])
            deviation = best["total_s"] / measured_s - 1
            steps[name] = {**best, "fastest_s": measured_s, "deviation": deviation}
    if len(steps) < 2:
        return None
    ours, plain = steps.values()
    predicted, measured = (plain[key] / ours[key] for key in ("total_s", "fastest_s"))
    speedup = {"predicted": predicted, "measured": measured, "deviation": predicted / measured - 1}
    return {"steps": steps, "speedup": speedup}


def render(
    bound: Mapping[str, float] | None, prediction: Mapping[str, Any] | None, median_s: float
) -> Iterator[str | Table]:
    """Yields what shows a bound and a prediction beside the median time of a step."""
    number = format_significant
    if bound is None:
        yield "roofline bound: unknown, because the model does not say which products it computes"
    else:
        rows = [{**bound, "form": "direct"}]
        if bound["used_flops"] < bound["flops"]:
            used = {"total_s": bound["used_total_s"], "flops": bound["used_flops"]}
            rows.append({"form": "tiled convolutions", **used})
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
    if prediction is None:
        return
    steps, speedup = prediction["steps"], prediction["speedup"]
    columns: Columns = {
        "predicted step (ms)": "name",
        "convo-\nlutions": ("convolutions_s", 1e-3),
        "dense": ("dense_s", 1e-3),
        "opti-\nmizer": ("optimizer_s", 1e-3),
        "other\nlayers": ("other_layers_s", 1e-3),
        "batches": ("batches_s", 1e-3),
        "total": ("total_s", 1e-3),
        "fastest\nmeasured": ("fastest_s", 1e-3),
        "deviation": lambda step: f"{100 * step['deviation']:+.0f} %",
    }
    yield table([{**step, "name": name} for name, step in steps.items()], columns)
    yield (
        f"predicted speed-up {number(speedup['predicted'])}, of the fastest steps"
        f" {number(speedup['measured'])}: a deviation of {100 * speedup['deviation']:+.0f} %"
    )
    if used := next(iter(steps.values()))["algorithms"]:
        found = ", ".join(f"{layer} {algorithm}" for layer, algorithm in used.items())
        yield f"algorithms of the convolutions: {found}"
