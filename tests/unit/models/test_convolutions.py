"""The convolutions of candle_p1.ops, alone and together with the layers around them."""

from __future__ import annotations

import os
import subprocess
import sys
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
from candle_p1.models.fast.layers import Conv1D, MaxPooling1D  # noqa: E402

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
    """Returns outputs, and gradients of a function of them to the inputs and all weights."""
    fast.choose(kind, on_cpu=True)

    @tf.function
    def values_and_gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)
            loss = tf.reduce_sum(tf.sin(3 * y))
        return y, *tape.gradient(loss, [x, *(v.value for v in model.trainable_variables)])

    return [each.numpy() for each in values_and_gradients(tf.constant(x))]


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


def types_behind(tensor):
    """Returns the types of all operations that a tensor depends on, as often as they occur."""
    seen, waiting = set(), [tensor.op]
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += [each.op for each in operation.inputs]
    return sorted(each.type for each in seen if "onv" in each.type or "Pool" in each.type)


def graph_of(model, shape):
    return tf.function(model).get_concrete_function(tf.TensorSpec(shape)).outputs[0]


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
    model = network(length, channels, convolutions)
    compare(model, np.random.default_rng(seed), batch)


NT3 = 600, 1, [(128, 20, "relu", 1), (128, 10, "relu", 10)]
P1B3 = 600, 1, [(10, 10, "relu", 10), (5, 5, "relu", 3)]


@pytest.mark.parametrize("sizes", [NT3, P1B3, (400, 64, [(96, 9, None, 1)])])
def test_the_networks_of_the_benchmarks(sizes):
    model = network(*sizes)
    x, found = compare(model, np.random.default_rng(1))
    for one, again in zip(found, compute(model, x, "fast"), strict=True):
        np.testing.assert_array_equal(one, again)


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
    assert types_behind(graph_of(network(600, 1, convolutions), (None, 600, 1))) == types


def test_layers_that_use_the_same_output_twice():
    # With weights that put an output within rounding of zero, or of the other one of its pool, the
    # two ways have different gradients: about one of 400 draws.
    keras.utils.set_random_seed(3)
    inputs = keras.layers.Input((300, 32))
    between = Conv1D(64, 5, activation="relu")(inputs)
    pooled = MaxPooling1D(2)(between)
    model = keras.Model(inputs, keras.layers.Concatenate(axis=1)([between, pooled]))
    compare(model, np.random.default_rng(3))


@pytest.mark.parametrize("sizes", [NT3, P1B3])
def test_outputs_and_gradients_know_their_shapes(sizes):
    """The log of communication needs them while the step is traced."""
    model, shapes = network(*sizes), []

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            y = model(x)
            loss = tf.reduce_sum(y)
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        shapes.extend(each.shape for each in [y, *found])
        return found

    gradients(tf.zeros((2, *sizes[:2])))
    expected = [(2, *model.output_shape[1:]), *(v.shape for v in model.trainable_variables)]
    assert shapes == expected


def test_any_number_of_threads_gives_the_same_up_to_rounding(monkeypatch):
    model = network(*NT3)
    monkeypatch.setattr(ops, "num_threads", lambda: 1)
    x, found = compare(model, np.random.default_rng(4), 3)
    for number in (2, 7):
        monkeypatch.setattr(ops, "num_threads", lambda number=number: number)
        other = compute(model, x, "fast")
        np.testing.assert_array_equal(found[0], other[0])
        assert_close(other, found)


def test_shapes_that_do_not_fit_are_refused():
    settings = {"pool": 1, "rectify": 0, "by_tiles": 1, "threads": 1}
    nothing = tf.zeros((0, 1, 32)), tf.zeros((0,))
    convolve = ops.load().candle_p1_convolve
    values, kernel, biases = tf.zeros((1, 99, 32)), tf.zeros((5, 32, 32)), tf.zeros(32)
    assert convolve(values, *nothing, kernel, biases, **settings).maxima.shape == (1, 95, 32)
    for wrong in (
        (values[..., :9], *nothing, kernel, biases),
        (values, *nothing, kernel, biases[:3]),
        (values, *nothing, tf.zeros((17, 32, 32)), biases),  # longer than tiles allow
        (values[:, :4], *nothing, kernel, biases),
        (values[..., :1], tf.zeros((3, 1, 31)), biases, kernel, biases),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="shapes do not fit"):
            convolve(*wrong, **settings)
