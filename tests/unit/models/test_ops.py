"""The custom operations for TensorFlow."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1 import ops
from candle_p1.ops.updates import Update, update
from tests.conftest import NEEDS_HOROVOD

tf = pytest.importorskip("tensorflow", reason=NEEDS_HOROVOD)
rng = np.random.default_rng(5)


def test_the_clock_agrees_with_python_and_waits_for_its_input():
    def wait(value):
        time.sleep(0.05)
        return value

    @tf.function
    def readings(value):
        slow = tf.ensure_shape(tf.numpy_function(wait, [value], value.dtype), value.shape)
        return ops.read_clock(value), ops.read_clock(slow)

    value = tf.zeros(3)
    readings(value)
    before = time.perf_counter()
    early, late = (reading.numpy() for reading in readings(value))
    assert early.dtype == np.float64
    assert before < early < time.perf_counter()
    assert before + 0.05 <= late < time.perf_counter()
    assert ops.read_clock(tf.zeros((2, 3), tf.bool)).shape == ()


def test_of_a_tensor_on_a_gpu_the_clock_takes_one_element(monkeypatch):
    taken, clock = [], ops.load().candle_p1_clock

    def spy(after):
        taken.append(after.shape.num_elements())
        return clock(after)

    monkeypatch.setattr(ops, "load", lambda: SimpleNamespace(candle_p1_clock=spy))
    for shape in ((), (300, 300)):
        for on_gpu in (False, True):
            before = time.perf_counter()
            assert before < ops.read_clock(tf.zeros(shape), on_gpu=on_gpu) < time.perf_counter()
    assert taken == [1, 1, 90_000, 1]


def apply(variable, mean_square, gradient, threads):
    step = Update("rmsprop", (0.01, 0.9, 1e-7, 0), ([mean_square],))
    update(step, [variable], [gradient], threads=threads)


@pytest.mark.parametrize("num", [0, 1, 1000, 3 << 17])
def test_rmsprop_gives_the_same_bits_with_any_number_of_threads(num):
    start, square, gradient = rng.normal(size=(3, num)).astype("float32")
    square = np.abs(square)
    expected_square = 0.9 * square + 0.1 * gradient**2
    expected = start - 0.01 * gradient / np.sqrt(expected_square + 1e-7)
    found = []
    for threads in (1, 2, 5):
        variable, mean_square = tf.Variable(start), tf.Variable(square)
        apply(variable, mean_square, tf.constant(gradient), threads)
        np.testing.assert_allclose(mean_square, expected_square, rtol=1e-6)
        np.testing.assert_allclose(variable, expected, rtol=1e-5, atol=1e-7)
        found.append(variable.numpy().tobytes() + mean_square.numpy().tobytes())
    assert len(set(found)) == 1


def test_values_read_before_an_update_do_not_change():
    variable, mean_square = tf.Variable(tf.ones(8)), tf.Variable(tf.ones(8))
    before = variable.read_value()
    apply(variable, mean_square, tf.ones(8), 1)
    assert (before.numpy() == 1).all()
    assert (variable.numpy() < 1).all()


def add_scaled(values, others, factor, threads=1):
    return ops.load().candle_p1_add_scaled(values, others, factor, threads=threads)


@pytest.mark.parametrize("shape", [(0,), (), (7, 3), (3 << 9, 1 << 8)])
def test_adding_gives_the_same_bits_with_any_number_of_threads(shape):
    values, others = rng.normal(size=(2, *shape)).astype("float32")
    expected = values + np.float32(0.3) * others
    found = []
    for threads in (1, 2, 5):
        result = add_scaled(tf.constant(values), tf.constant(others), tf.constant(0.3), threads)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
        found.append(result.numpy().tobytes())
    assert len(set(found)) == 1


def test_adding_does_not_overwrite_values_that_are_still_needed():
    values, others = tf.ones((2, 3)), tf.ones((2, 3))

    @tf.function
    def compute(values, others):
        product = 2 * values
        total = add_scaled(product, others, tf.constant(3.0))
        assert total.shape == (2, 3)
        return total, product

    for _ in range(2):
        total, product = compute(values, others)
        np.testing.assert_array_equal(total, np.full((2, 3), 5))
        np.testing.assert_array_equal(product, np.full((2, 3), 2))
    assert (values.numpy() == 1).all()
    assert (others.numpy() == 1).all()
