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


def add_scaled(values, others, factor, threads=1):
    return ops.load().candle_p1_add_scaled(values, others, factor, threads=threads)


def added(values, others, threads):
    result = add_scaled(tf.constant(values), tf.constant(others), tf.constant(0.3), threads)
    return [result], [values + np.float32(0.3) * others]


def apply(variable, mean_square, gradient, threads):
    step = Update("rmsprop", (0.01, 0.9, 1e-7, 0), ([mean_square],))
    update(step, [variable], [gradient], threads=threads)


def updated(start, gradient, threads):
    variable, mean_square = tf.Variable(start), tf.Variable(tf.ones_like(start))
    apply(variable, mean_square, tf.constant(gradient), threads)
    square = 0.9 + 0.1 * gradient**2
    return [mean_square, variable], [square, start - 0.01 * gradient / np.sqrt(square + 1e-7)]


@pytest.mark.parametrize("work", [added, updated])
@pytest.mark.parametrize("shape", [(0,), (), (7, 3), (1000,), (3 << 9, 1 << 8)])
def test_any_number_of_threads_computes_the_same_bits(shape, work):
    values, others = rng.normal(size=(2, *shape)).astype("float32")
    of_threads = set()
    for threads in (1, 2, 5):
        found, expected = work(values, others, threads)
        for one, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-6)
        of_threads.add(b"".join(each.numpy().tobytes() for each in found))
    assert len(of_threads) == 1


def test_values_that_are_still_needed_are_not_overwritten():
    variable, mean_square = tf.Variable(tf.ones(8)), tf.Variable(tf.ones(8))
    before = variable.read_value()
    apply(variable, mean_square, tf.ones(8), 1)
    assert (before.numpy() == 1).all()
    assert (variable.numpy() < 1).all()
    values, others = tf.ones((2, 3)), tf.ones((2, 3))

    @tf.function
    def compute(values, others):
        product = 2 * values
        total = add_scaled(product, others, tf.constant(3.0))
        assert total.shape == (2, 3)
        return total, product, values, others

    for _ in range(2):
        results = compute(values, others)
        assert [set(each.numpy().ravel()) for each in results] == [{5}, {2}, {1}, {1}]
