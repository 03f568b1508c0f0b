"""Averages and updates through shared memory; the ranks are threads, each with its own mapping."""

import time

import numpy as np
import pytest

from candle_p1 import ops
from candle_p1.distributed.reducers import shared_memory
from candle_p1.distributed.reducers.shared_memory import SharedMemoryReducer
from candle_p1.distributed.shared_file import NoRoomError
from candle_p1.ops.updates import RULES, Update, update
from tests.conftest import NEEDS_HOROVOD
from tools.simulated import SimulatedJob

tf = pytest.importorskip("tensorflow", reason=NEEDS_HOROVOD)

PIECE = 1 << 17
"""The float32 values that are averaged at a time."""


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    monkeypatch.setattr(ops, "num_threads", lambda: request.param)
    return request.param


def exchanged(num_ranks, work, timeout_s=60):
    """Returns what `work(reducer, rank)` returns on each rank."""

    def on_rank(comm):
        return work(SharedMemoryReducer(comm, timeout_s), comm.rank)

    return SimulatedJob(num_ranks, num_ranks).run(on_rank)


def check_equal(everyone, expected, rtol, atol):
    """Checks that all ranks have the same bits, and that they are as expected."""
    for found in everyone:
        for array, first, right in zip(found, everyone[0], expected, strict=True):
            assert array.dtype == right.dtype
            assert array.tobytes() == first.tobytes()
            np.testing.assert_allclose(array, right, rtol, atol)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ranks_get_the_average_and_the_same_bits(num_ranks, dtype, threads):
    rng = np.random.default_rng(num_ranks)
    shapes = [(), (0,), (1,), (7, 5), (PIECE,), (3, PIECE + 1), (5 * PIECE - 3,)]
    given = [rng.normal(size=(num_ranks, *shape)).astype(dtype) for shape in shapes]

    def work(reducer, rank):
        averages = []
        for repeat in range(3):  # so that buffers are used again
            for number, values in enumerate(given):
                value = tf.constant(values[rank] * (repeat + 1))
                averages.append(reducer.average_tensor(value, f"{number}").numpy())
        return averages

    everyone = exchanged(num_ranks, work)
    expected = [values.mean(axis=0) * (repeat + 1) for repeat in range(3) for values in given]
    tolerance = {"float32": 1e-6, "float64": 1e-15}[dtype]
    check_equal(everyone, expected, tolerance, tolerance)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_small_floating_point_numbers_are_added_as_float32(dtype, threads):
    def work(reducer, rank):
        return reducer.average_tensor(tf.constant([2048.0, 1.0], dtype) * (1 - rank) + rank, "x")

    for average in exchanged(2, work):
        assert average.dtype == dtype
        wanted = tf.cast([1024.5, 1.0], dtype)
        assert (average.numpy() == wanted.numpy()).all()


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize(
    "values",
    [
        np.arange(3 * PIECE + 5, dtype=np.float32),
        np.float64([1e300, -0.0, np.nan]),
        np.int64([2**62 + 1, -1]),
        np.array([True, False]),
        np.uint8(200),
    ],
)
def test_the_roots_bits_are_copied_to_all_ranks(values, root, threads):
    def work(reducer, rank):
        value = tf.constant(values if rank == root else np.zeros_like(values))
        return reducer.broadcast_tensor(value, "x", root).numpy()

    for found in exchanged(3, work):
        assert found.dtype == values.dtype
        assert found.tobytes() == values.tobytes()


CONSTANTS = {
    "descend": (0.01,),
    "momentum": (0.01, 0.9),
    "adam": (0.01, 0.9, 0.999, 1e-7),
    "rmsprop": (0.01, 0.9, 0.0, 1e-8),
}
NUM_STATES = {"descend": 0, "momentum": 1, "adam": 2, "rmsprop": 1}
SHAPES = [(), (0,), (1,), (7, 5), (3 * PIECE - 3,), (2, PIECE + 1)]


def trained(execute, arrays, gradients, rule):
    """Returns weights and state, as arrays, after an update with each list of gradients."""
    weights, *states = [[tf.Variable(each) for each in of] for of in arrays]
    step = Update(rule, CONSTANTS[rule], states)
    for each in gradients:
        execute(step, weights, {f"g{i}": tf.constant(g) for i, g in enumerate(each)})
    return [variable.numpy() for of in (weights, *states) for variable in of]


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("rule", RULES)
def test_an_update_together_is_that_by_the_average_on_all_ranks(num_ranks, rule, threads):
    rng = np.random.default_rng(num_ranks)
    of_state = [[np.zeros(shape, "float32") for shape in SHAPES]] * NUM_STATES[rule]
    arrays = [[rng.normal(size=shape).astype("float32") for shape in SHAPES], *of_state]
    everyones = [(num_ranks, *shape) for shape in SHAPES]
    steps = [[rng.normal(size=each).astype("float32") for each in everyones] for _ in range(3)]

    def together(reducer, rank):
        mine = [[gradient[rank] for gradient in step] for step in steps]
        return trained(reducer.fused_update, arrays, mine, rule)

    everyone = exchanged(num_ranks, together)
    averages = [[gradient.mean(axis=0) for gradient in step] for step in steps]

    def alone(step, weights, gradients):
        return update(step, weights, list(gradients.values()))

    expected = trained(alone, arrays, averages, rule)
    check_equal(everyone, expected, 1e-4, 1e-6)
    assert (everyone[0][3] != arrays[0][3]).all()


def test_an_update_tells_how_long_the_rank_has_not_waited():
    def work(reducer, rank):
        begin = time.perf_counter()
        if rank:
            time.sleep(0.2)
        weights = [tf.Variable(tf.zeros(10 * PIECE))]
        gradients = {"g": tf.ones(10 * PIECE)}
        apart_s = reducer.fused_update(Update("descend", (0.1,)), weights, gradients)
        return float(apart_s), time.perf_counter() - begin

    for apart_s, elapsed_s in exchanged(2, work):
        assert 0 < apart_s < elapsed_s - 0.1


def update_by_different_rules(reducer, rank):
    variable = tf.Variable(tf.zeros(3))
    step = Update(*(("momentum", (1, 0), ([variable],)) if rank else ("descend", (1,))))
    reducer.fused_update(step, [tf.Variable(tf.zeros(3))], {"g": tf.ones(3)})


def average_different_gradients(reducer, rank):
    reducer.average_tensor(tf.zeros(3 + rank), "x")


@pytest.mark.parametrize("work", [update_by_different_rules, average_different_gradients])
def test_ranks_that_do_different_things_say_so(work):
    def fails(reducer, rank):
        with pytest.raises(tf.errors.AbortedError, match="different gradients at the same time"):
            work(reducer, rank)

    exchanged(3, fails)


def test_a_rank_that_does_not_come_is_named():
    def work(reducer, rank):
        if rank == 1:
            return
        with pytest.raises(tf.errors.AbortedError, match=r"rank 1 of this node.*stall_shutdown_s"):
            reducer.average_tensor(tf.zeros(3), "x")

    exchanged(3, work, timeout_s=0.2)


def test_memory_that_is_full_is_an_error_of_all_ranks_and_nothing_remains(monkeypatch, tmp_path):
    def full(file, begin, length):
        raise OSError(28, "No space left on device")

    def work(comm):
        with pytest.raises(NoRoomError, match="through which the ranks of a node average"):
            SharedMemoryReducer(comm, 60)

    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path)
    exchanged(2, lambda reducer, rank: None)
    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    SimulatedJob(2, 2).run(work)
    assert not list(tmp_path.iterdir())
