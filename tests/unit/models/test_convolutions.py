"""The convolutions of candle_p1.ops, alone and together with the layers around them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import NEEDS_HOROVOD

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
if keras.backend.backend() != "tensorflow":
    pytest.skip(NEEDS_HOROVOD, allow_module_level=True)

import tensorflow as tf  # noqa: E402

from candle_p1 import ops  # noqa: E402
from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast.convolution_algorithms import Convolution, tile_products  # noqa: E402
from candle_p1.models.fast.layers import Conv1D, MaxPooling1D  # noqa: E402
from tests.unit.models.conftest import values_and_gradients  # noqa: E402

CLOSE = 2e-5
"""The largest difference, relative to the largest value: a hundred roundings of float32."""
pytestmark = pytest.mark.usefixtures("fast_kernels")


def network(length, channels, convolutions):
    """Returns layers, each convolution given as (filters, taps, activation, pool)."""
    layers = [keras.layers.Input((length, channels))]
    for filters, taps, activation, pool in convolutions:
        layers += [Conv1D(filters, taps, activation=activation), MaxPooling1D(pool)]
    return keras.Sequential(layers)


def compute(model, x, kind):
    fast.choose(kind, on_cpu=True)
    return values_and_gradients(model, x)


def compare(model, rng, batch=2):
    """Asserts that the fast form of a model computes what Keras does; returns its results."""
    for variable in model.trainable_variables:
        fan = np.prod(variable.shape[:-1]) if len(variable.shape) > 1 else 9
        variable.assign(rng.normal(size=variable.shape) / np.sqrt(fan))
    x = rng.normal(size=(batch, *model.input_shape[1:])).astype("float32")
    found = compute(model, x, "fast")
    assert_close(found, compute(model, x, "plain"))
    return x, found


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= CLOSE * np.abs(other).max()


@pytest.mark.extended
@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(300, 900),
    channels=st.sampled_from([1, 2, 31, 40]),
    first=st.sampled_from([(), (70, 20, "relu", 1), (64, 3, "relu", 2), (40, 7, "tanh", 1)]),
    filters=st.sampled_from([1, 5, 33, 96]),
    taps=st.integers(1, 20),
    activation=st.sampled_from([None, "relu", "sigmoid"]),
    pool=st.sampled_from([1, 2, 7, 10]),
    seed=st.integers(0, 99),
)
def test_convolutions_compute_the_same_as_keras(
    batch, length, channels, first, filters, taps, activation, pool, seed
):
    convolutions = [*([first] if first else []), (filters, taps, activation, pool)]
    compare(network(length, channels, convolutions), np.random.default_rng(seed), batch)


NT3 = 600, 1, [(128, 20, "relu", 1), (128, 10, "relu", 10)]
P1B3 = 600, 1, [(10, 10, "relu", 10), (5, 5, "relu", 3)]


@pytest.mark.parametrize("sizes", [NT3, P1B3, (400, 64, [(96, 9, None, 1)])])
def test_the_networks_of_the_benchmarks(sizes):
    model = network(*sizes)
    x, found = compare(model, np.random.default_rng(1))
    for one, again in zip(found, compute(model, x, "fast"), strict=True):
        np.testing.assert_array_equal(one, again)


@pytest.mark.extended
@pytest.mark.parametrize("instructions", ["avx2", "portable"])
def test_processors_without_the_newest_instructions(instructions):
    """The operations choose once in a process, so the tests above run in another one."""
    tests = f"{Path(__file__)}::test_the_networks_of_the_benchmarks"
    environment = os.environ | {"CANDLE_P1_INSTRUCTIONS": instructions}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "3 passed" in found.stdout


@pytest.mark.parametrize(
    ("convolutions", "types"),
    [
        (NT3[2], ["CandleP1Convolve"]),
        ([(128, 20, "relu", 2), (128, 10, "relu", 1)], ["CandleP1Convolve"] * 2),
        ([(128, 20, "tanh", 1), (128, 10, "relu", 1)], ["CandleP1Convolve"] * 2),
        ([(128, 10, "relu", 1), (128, 10, "tanh", 2)], ["CandleP1Convolve", "MaxPool"]),
        ([(5, 3, "relu", 1), (5, 3, "relu", 1)], ["Conv2D"] * 2),
    ],
)
def test_one_operation_takes_over_what_it_can(convolutions, types):
    traced = tf.function(network(600, 1, convolutions))
    seen = set()
    waiting = [traced.get_concrete_function(tf.TensorSpec((None, 600, 1))).outputs[0].op]
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += [each.op for each in operation.inputs]
    assert sorted(o.type for o in seen if "onv" in o.type or "Pool" in o.type) == types


def test_layers_that_use_the_same_output_twice():
    # With weights that put an output within rounding of zero, or of the other one of its pool, the
    # two ways have different gradients: about one of 400 draws.
    keras.utils.set_random_seed(3)
    inputs = keras.layers.Input((300, 32))
    between = Conv1D(64, 5, activation="relu")(inputs)
    pooled = MaxPooling1D(2)(between)
    model = keras.Model(inputs, keras.layers.Concatenate(axis=1)([between, pooled]))
    compare(model, np.random.default_rng(3))


def test_any_number_of_threads_gives_the_same_up_to_rounding(monkeypatch):
    model = network(*NT3)
    monkeypatch.setattr(ops, "num_threads", lambda: 1)
    x, found = compare(model, np.random.default_rng(4), 3)
    for number in (2, 7):
        monkeypatch.setattr(ops, "num_threads", lambda number=number: number)
        other = compute(model, x, "fast")
        np.testing.assert_array_equal(found[0], other[0])
        assert_close(other, found)


OF_NT3 = Convolution(60_464, 10, 128, 128, 10)
OF_P1B3 = Convolution(29_532, 10, 1, 10, 10)


@pytest.mark.parametrize(
    ("convolution", "algorithm", "in_float64"),
    [
        (Convolution(60_483, 20, 1, 128), "direct", "chunked"),  # NT3's at full size
        (OF_NT3, "tiled", "chunked"),
        (OF_P1B3, "direct", "whole"),
        (Convolution(2952, 5, 10, 5, 10), "whole", "whole"),
        (replace(OF_NT3, filters=8), "tiled", "whole"),
        (replace(OF_NT3, filters=7), "whole", "whole"),
        (replace(OF_NT3, taps=3), "direct", "chunked"),
        (replace(OF_NT3, taps=17), "direct", "chunked"),
        (replace(OF_NT3, length=200), "direct", "whole"),
        (replace(OF_NT3, pool=256), "chunked", "chunked"),
        (replace(OF_P1B3, pool=1), "whole", "whole"),
        (replace(OF_P1B3, pool=256), "whole", "whole"),
    ],
)
def test_a_layer_takes_the_algorithm_that_suits_it(convolution, algorithm, in_float64):
    assert convolution.choose() == algorithm
    assert convolution.choose(in_blocks=False) == in_float64


def test_tiles_take_a_fifth_of_the_multiplications():
    assert tile_products(10, 128, 128) == pytest.approx(10 * 128 * 128 / 4.9, rel=0.01)
    assert tile_products(10, 10, 5) == tile_products(10, 32, 32)
