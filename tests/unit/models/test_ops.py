"""The custom operations for TensorFlow."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1 import ops
from candle_p1.distributed.engines import horovod
from candle_p1.ops.updates import Update
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


@pytest.mark.parametrize("dtype", [tf.float16, tf.int64, tf.bool])
def test_the_clock_takes_any_tensor(dtype):
    assert ops.read_clock(tf.zeros((2, 3), dtype)).shape == ()


@pytest.fixture
def taken(monkeypatch):
    """The numbers of elements that the clock's operation is given."""
    taken, clock = [], ops.load().candle_p1_clock

    def spy(after):
        taken.append(after.shape.num_elements())
        return clock(after)

    monkeypatch.setattr(ops, "load", lambda: SimpleNamespace(candle_p1_clock=spy))
    return taken


def test_of_a_tensor_on_a_gpu_the_clock_takes_one_element(taken):
    for shape in ((), (7,), (300, 300)):
        for on_gpu in (False, True):
            before = time.perf_counter()
            assert before < ops.read_clock(tf.zeros(shape), on_gpu=on_gpu) < time.perf_counter()
    assert taken == [1, 1, 7, 1, 90_000, 1]


def test_the_state_of_a_model_on_a_gpu_is_broadcast_without_copying_it_to_the_host(
    monkeypatch, taken
):
    """Horovod's broadcast takes 50 ms; the devices of the variables are only said to be GPUs."""
    noted = []

    def slow(value, root_rank, name):
        def wait(array):
            time.sleep(0.05)
            return array + 1

        return tf.ensure_shape(tf.numpy_function(wait, [value], value.dtype), value.shape)

    monkeypatch.setattr(horovod, "_horovod", lambda: SimpleNamespace(broadcast=slow))
    monkeypatch.setattr(horovod, "_is_on_gpu", lambda variable: True)
    monkeypatch.setattr(horovod, "note_collective", lambda *what: noted.append(what))
    weights = [tf.Variable(tf.zeros((50, 4))), tf.Variable(tf.zeros(3))]
    state = [SimpleNamespace(value=weight) for weight in weights]
    model = SimpleNamespace(weights=state, optimizer=SimpleNamespace(variables=[]))
    ranks = SimpleNamespace(size=2, rank=0)
    horovod.HorovodEngine(ranks, "tensorflow").broadcast_state(model)
    ((library, name, num_bytes, seconds),) = noted
    assert (library, name, num_bytes) == ("horovod", "broadcast", 4 * 203)
    assert seconds >= 0.05
    assert set(taken) == {1}
    assert all((weight.numpy() == 1).all() for weight in weights)


def apply(variable, mean_square, gradient, threads, epsilon=1e-7, outer_epsilon=0):
    constants = 0.01, 0.9, epsilon, outer_epsilon
    update = Update("rmsprop", constants, ([mean_square],))
    update.execute([variable], [gradient], threads=threads)


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


def test_epsilon_can_be_added_to_the_root():
    gradient = np.array([0, 1e-9, 1e-8, 1], np.float32)
    variable = tf.Variable(tf.zeros(4))
    apply(
        variable, tf.Variable(tf.zeros(4)), tf.constant(gradient), 1, epsilon=0, outer_epsilon=1e-8
    )
    expected = -0.01 * gradient / (np.sqrt(0.1) * gradient + 1e-8)
    np.testing.assert_allclose(variable, expected, rtol=1e-6)


def test_values_read_before_an_update_do_not_change():
    variable, mean_square = tf.Variable(tf.ones(8)), tf.Variable(tf.ones(8))
    before = variable.read_value()
    apply(variable, mean_square, tf.ones(8), 1)
    assert (before.numpy() == 1).all()
    assert (variable.numpy() < 1).all()


def test_a_rule_refuses_the_state_and_constants_of_another_one():
    variable = tf.Variable(tf.ones(8))
    for update in (
        Update("adam", (1, 1, 1, 1), ([variable],)),
        Update("descend", (1, 1)),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError):
            update.execute([variable], [tf.ones(8)], threads=1)
    assert (variable.numpy() == 1).all()


def test_rmsprop_refuses_unequal_shapes_and_dtypes():
    variable = tf.Variable(tf.ones(8))
    with pytest.raises(tf.errors.InvalidArgumentError, match="shapes"):
        apply(variable, tf.Variable(tf.ones(7)), tf.ones(8), 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="shapes"):
        apply(variable, tf.Variable(tf.ones(4, tf.float64)), tf.ones(8), 1)
    assert (variable.numpy() == 1).all()


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
        return add_scaled(product, others, tf.constant(3.0)), product

    for _ in range(2):
        total, product = compute(values, others)
        np.testing.assert_array_equal(total, np.full((2, 3), 5))
        np.testing.assert_array_equal(product, np.full((2, 3), 2))
    assert (values.numpy() == 1).all()
    assert (others.numpy() == 1).all()


def test_the_shape_of_a_sum_is_inferred_and_unequal_shapes_are_refused():
    graph = tf.function(lambda x: add_scaled(x, x, tf.constant(1.0)))
    outputs = graph.get_concrete_function(tf.TensorSpec((None, 3))).outputs
    assert outputs[0].shape.as_list() == [None, 3]
    with pytest.raises(tf.errors.InvalidArgumentError, match="unequal shapes"):
        add_scaled(tf.ones(8), tf.ones(7), tf.constant(1.0))
