"""The operations of our own for TensorFlow."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from candle_p1 import ops

rng = np.random.default_rng(5)


def test_the_clock_is_that_of_python_and_waits_for_its_input():
    @tf.function
    def readings(matrix):
        early = ops.read_clock(matrix)
        product = matrix
        for _ in range(20):
            product = tf.matmul(product, matrix) / 100
        return early, ops.read_clock(product), product

    matrix = tf.random.stateless_normal((300, 300), (1, 2))
    readings(matrix)
    before = time.perf_counter()
    early, late, _ = readings(matrix)
    assert before < early.numpy() < late.numpy() < time.perf_counter()
    assert early.dtype == tf.float64


@pytest.mark.parametrize("dtype", [tf.float16, tf.int64, tf.bool])
def test_the_clock_takes_any_tensor(dtype):
    assert ops.read_clock(tf.zeros((2, 3), dtype)).shape == ()


def apply(variable, mean_square, gradient, threads):
    ops.load().candle_p1_rmsprop(
        variable.handle,
        mean_square.handle,
        gradient,
        tf.constant(0.01),
        decay=0.9,
        epsilon=1e-7,
        threads=threads,
    )


@pytest.mark.parametrize("num", [0, 1, 1000, 3 << 17])
def test_rmsprop_is_the_same_by_any_number_of_threads(num):
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


def test_who_has_read_a_variable_keeps_its_values():
    variable, mean_square = tf.Variable(tf.ones(8)), tf.Variable(tf.ones(8))
    before = variable.read_value()
    apply(variable, mean_square, tf.ones(8), 1)
    assert (before.numpy() == 1).all()
    assert (variable.numpy() < 1).all()


def test_rmsprop_refuses_what_does_not_fit():
    variable = tf.Variable(tf.ones(8))
    with pytest.raises(tf.errors.InvalidArgumentError, match="unequal shapes or dtypes"):
        apply(variable, tf.Variable(tf.ones(7)), tf.ones(8), 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="unequal shapes or dtypes"):
        apply(variable, tf.Variable(tf.ones(4, tf.float64)), tf.ones(8), 1)
    assert (variable.numpy() == 1).all()
