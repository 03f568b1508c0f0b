"""Predicts the time of a training step from its operations, its bytes and the machine's rates.

The convolutions take what candle_p1.models.fast.convolution_costs says of their algorithm. The
optimizer's passes, and what other layers write and read, are counted at the rates themselves. The
dense layers' products are timed alone, because their rate depends on the shapes: a batch of
few samples reaches a part of that of large matrices. A run makes its batches on the cores that
compute, and how long that takes depends on the benchmark, so it is measured, too; plain Keras
copies batches out of arrays. None of it is fitted to the benchmarks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.bench.harness import Columns, format_significant, table
from candle_p1.bench.roofline import matmul_s, optimizer_bytes
from candle_p1.models.fast import CHUNK
from candle_p1.models.fast.convolution_costs import FACTORS, choose, seconds

if TYPE_CHECKING:
    from rich.table import Table

    from candle_p1.bench.training import Training
    from candle_p1.models.fast.convolution_costs import Convolution, Rates

FLOAT_BYTES = 4
PLAIN_PASSES = {"SGD": 5, "RMSprop": 23, "Adam": 31}
"""How often Keras's own optimizers read or write an array of the weights' size in an update: SGD
multiplies (2) and subtracts (3), the others do one operation of their formulas after another."""
LAYER_PASSES = 4
"""How often an output of a layer without weights is written or read, forward and backward."""
BATCH_PASSES = 4
"""How often a batch of arrays is: gathered and then copied to a tensor."""
MAX_BATCHES = 10
"""The number of batches whose making is timed."""
NUM_CALLS = 10
"""How often a product is timed; the fastest call counts, as for the rates."""


def batch_s(batches: Iterable[Any]) -> float:
    """Returns how long it takes to make a batch if nothing else is done, in s; 0 for only one."""
    begin, num = 0.0, 0
    for num, _ in enumerate(islice(batches, MAX_BATCHES + 1)):
        if num == 0:  # for which a thread has to start
            begin = time.perf_counter()
    return (time.perf_counter() - begin) / num if num else 0.0


def dense_products(model: Any, batch_size: int) -> list[tuple[int, int, int]]:
    """Returns the (m, k, n) of the dense layers' products, of which each is (m, k) by (k, n).

    They give the outputs and the gradients of kernels and of inputs; the inputs of the first layer
    with weights need no gradient.
    """
    import keras

    products = []
    with_weights = [layer for layer in model.layers if layer.weights]
    for layer in with_weights:
        if isinstance(layer, keras.layers.Dense):
            features, units = layer.kernel.shape
            products += [(batch_size, features, units), (features, batch_size, units)]
            if layer is not with_weights[0]:
                products.append((batch_size, units, features))
    return products


def gemm_s(products: Iterable[tuple[int, int, int]]) -> float:
    """Returns the time of matrix products, each alone, in s: the sum of the fastest calls."""
    return sum(matmul_s(product, NUM_CALLS, min) for product in products)


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

    Args:
        model: A built Keras model, a chain of layers; its own kernels do not matter.
        batch_size: The samples of a step.
        rates: The machine's rates.
        is_fast: Whether to predict the fast kernels, and not Keras's own.
        dense_s: The time of the dense layers' products.
        batches_s: The time that making the batch takes from the step; None: it is part of arrays.

    Returns None if the model has what is not counted: branches, convolutions of another kind, or an
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
    others = [each for each in model.layers if not each.weights and not isinstance(each, passing)]
    float_s = FLOAT_BYTES * batch_size / rates.bytes_per_s
    if batches_s is None:
        batches_s = BATCH_PASSES * float_s * math.prod(model.inputs[0].shape[1:])
    parts = {
        "convolutions_s": sum(
            seconds(algorithms[name], of, rates, FACTORS) for name, of in convolutions.items()
        ),
        "dense_s": dense_s,
        "optimizer_s": update_bytes / rates.bytes_per_s,
        "other_layers_s": sum(
            LAYER_PASSES * float_s * math.prod(layer.output.shape[1:]) for layer in others
        ),
        "batches_s": batches_s,
    }
    return {**parts, "total_s": sum(parts.values()), "algorithms": algorithms}


def _convolutions(model: Any, batch_size: int) -> dict[str, Convolution] | None:
    """Returns the convolutions with the pooling after them, by the layer's name.

    One of a single channel that a convolution by tiles computes once more is part of that one.
    """
    import keras

    from candle_p1.models.fast.layers import Conv1D

    layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    found: dict[str, Convolution] = {}
    before: tuple[str, Convolution] | None = None
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if isinstance(layer, keras.layers.MaxPooling1D) and layer.pool_size == (1,):
            continue
        if "conv" not in type(layer).__name__.lower():
            before = None
            continue
        if not isinstance(layer, Conv1D):
            return None
        pool = following.pool_size[0] if isinstance(following, keras.layers.MaxPooling1D) else 1
        of = layer.convolution(pool)
        if of is None:
            return None
        of = replace(of, batch=batch_size)
        if before is not None and choose(of) == "tiled" and before[1].channels == 1:
            name, first = before
            del found[name]
            of = replace(of, length=first.length, first_taps=first.taps, gives_gradient=False)
        found[layer.name] = of
        rectifies = layer.activation is keras.activations.relu
        before = (layer.name, of) if pool == 1 and rectifies else None
    return found


def _algorithm(of: Convolution) -> str:
    if of.length < CHUNK + of.taps:
        return "plain"
    return "tiled" if of.first_taps else choose(of)


def _plain_update_bytes(model: Any) -> int | None:
    kinds = {cls.__name__ for cls in type(model.optimizer).__mro__}
    passes = [num for name, num in PLAIN_PASSES.items() if name in kinds]
    weights = sum(int(np.prod(v.shape)) for v in model.trainable_weights)
    return passes[0] * FLOAT_BYTES * weights if passes else None


def predict_variants(training: Training, rates: Rates) -> list[dict[str, Any] | None]:
    """Returns the predicted steps of a run and of plain Keras."""
    from candle_p1.models.fast.batches import for_fit

    model, size = training.models[0], training.plan.batch_size
    # One thread makes batches while the others compute.
    batches_s = batch_s(for_fit(training.batches())) / training.device.threads
    dense_s = gemm_s(dense_products(model, size))
    return [
        predict(model, size, rates, is_fast=True, dense_s=dense_s, batches_s=batches_s),
        predict(model, size, rates, is_fast=False, dense_s=dense_s),
    ]


def compare_prediction(
    fastest_s: Mapping[str, float], predictions: Sequence[Mapping[str, Mapping[str, Any]]]
) -> dict[str, Any] | None:
    """Returns the predicted steps and their ratio beside the measured ones; None without them.

    The model is fitted to times that nothing has disturbed, so the fastest steps of all rounds are
    compared with the shortest predictions. A deviation is that of the prediction, relative to the
    measurement. Predictions are by variant, those of each round.
    """
    steps: dict[str, dict[str, Any]] = {}
    for name in fastest_s:
        found = [of_round[name] for of_round in predictions if name in of_round]
        if found:
            best, fastest = min(found, key=lambda each: each["total_s"]), fastest_s[name]
            deviation = best["total_s"] / fastest - 1
            steps[name] = {**best, "fastest_s": fastest, "deviation": deviation}
    if len(steps) < 2:
        return None
    ours, plain = steps.values()
    predicted, measured = (plain[key] / ours[key] for key in ("total_s", "fastest_s"))
    speedup = {"predicted": predicted, "measured": measured, "deviation": predicted / measured - 1}
    return {"steps": steps, "speedup": speedup}


def render(prediction: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields a table and a line that show what `compare_prediction` returned."""
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
    used = next(iter(steps.values()))["algorithms"].items()
    algorithms = ", ".join(f"{layer} {algorithm}" for layer, algorithm in used)
    yield (
        f"predicted speed-up {format_significant(speedup['predicted'])}, of the fastest steps"
        f" {format_significant(speedup['measured'])}: a deviation of"
        f" {100 * speedup['deviation']:+.0f} %"
        + (f". Algorithms of the convolutions: {algorithms}" if algorithms else "")
    )
