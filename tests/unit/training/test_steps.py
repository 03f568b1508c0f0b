"""Blocks of steps on the device compute what single steps on streamed batches do, bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.benchmark import Samples, Selected, Several
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.scaling import ScalingPlan

pytestmark = pytest.mark.jax_engine
jax = pytest.importorskip("jax")
keras = pytest.importorskip("keras", reason="no Keras backend is installed")
steps_module = pytest.importorskip("candle_p1.training.steps")

from candle_p1.data.batches import EvaluationBatches, TrainBatches  # noqa: E402
from candle_p1.distributed.callbacks import evaluate_shared  # noqa: E402
from candle_p1.models.fast import device_data  # noqa: E402
from candle_p1.training.state import attach_state, build_metrics  # noqa: E402

COMM = SerialCommunicator()
RANDOM = np.random.default_rng(0)
MATRIX = RANDOM.normal(size=(50, 13)).astype("f4")
NUM_SAMPLES, BATCH, STEPS = 42, 4, 11
"""The last batch of an epoch has two samples."""
PLAN = ScalingPlan.make(
    num_ranks=1, epochs=2, batch_size=BATCH, learning_rate=0.1, num_samples=NUM_SAMPLES
)
ALL = 1 << 30


def samples():
    """Selected rows of a part of a matrix, whose columns are features, as well as the targets."""
    x = Selected(MATRIX[3:, 1:, np.newaxis], RANDOM.permutation(47)[:NUM_SAMPLES])
    return Samples(x, x)


def made():
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    layers = keras.layers
    hidden = layers.Flatten(), layers.Dense(5), layers.BatchNormalization(), layers.Dropout(0.3)
    inputs = layers.Input((12, 1))
    model = keras.Sequential([inputs, *hidden, layers.Dense(12), layers.Reshape((12, 1))])
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def trained(given, blocks, limit):
    """Trains two epochs in blocks of these sizes; returns all that they change, and the steps."""
    model, batches = made(), TrainBatches(given, PLAN, seed=5, rank=0, shuffle=True)
    build_metrics(model, batches[0])
    placement = device_data.place([given], limit)
    data = placement.data[0] if placement.data else None
    steps = steps_module.make_steps(model, batches, data, range(2))
    found = []
    for epoch in range(2):
        model.reset_metrics()
        step = 0
        while step < STEPS:
            num = min(blocks, steps.most(step))
            logs = steps.train(epoch, step, num)
            step += num
        found.append(steps_module.python_logs(logs))
        attach_state(model)
        share = EvaluationBatches(given, 5, COMM)
        evaluate = data and steps_module.evaluation_on_device(model, data, share)
        found.append(evaluate_shared(model, share, COMM, evaluate))
    variables = [*model.variables, *model.optimizer.variables]
    return found, [np.asarray(each.value).tobytes() for each in variables], steps


@pytest.mark.parametrize("blocks", [1, 3, STEPS])
def test_blocks_train_as_streamed_batches_do(blocks):
    given = samples()
    expected = trained(given, 1, limit=0)
    assert type(expected[2]) is steps_module.Steps
    found = trained(given, blocks, limit=ALL)
    assert found[:2] == expected[:2]
    assert found[2]._block._cache_size() == 2, "a program for full batches, one for the last"


def test_only_indices_are_sent(monkeypatch):
    """What is not put on the device by `jax.device_put` is not sent: JAX refuses."""
    sent, put = [], jax.device_put
    given = samples()
    model, batches = made(), TrainBatches(given, PLAN, seed=5, rank=0, shuffle=True)
    build_metrics(model, batches[0])
    (data,) = device_data.place([given], ALL).data
    steps = steps_module.make_steps(model, batches, data, range(2))
    for epoch in range(2):  # the first compiles, which sends constants
        with (
            monkeypatch.context() as patch,
            jax.transfer_guard_host_to_device("disallow" if epoch else "allow"),
        ):
            patch.setattr(
                jax, "device_put", lambda value, *to: sent.append(value) or put(value, *to)
            )
            for step, num in ((0, 4), (4, 6), (10, 1)):
                steps.train(epoch, step, num)
    sent = sent[len(sent) // 2 :]
    assert {each.dtype for each in sent} == {np.dtype("int32")}
    indices = sorted(np.concatenate([each.ravel() for each in sent[:2]]))
    assert indices == list(range(NUM_SAMPLES))
    assert sum(each.nbytes for each in sent) == 4 * NUM_SAMPLES + 3 * 8


def placed_arrays(placement):
    return [np.asarray(each) for each in jax.tree.leaves([d.arrays for d in placement.data])]


def test_each_array_is_placed_once_in_chunks_and_within_the_limit(monkeypatch):
    monkeypatch.setattr(device_data, "CHUNK_BYTES", 200)
    wide, labels = RANDOM.normal(size=(20, 6)).astype("f4")[:, ::2], np.arange(20)
    x = Several({"a": wide, "b": wide})
    one, two = Samples(x, labels), Samples(Selected(wide, np.array([4, 2])), labels[:2])
    shown = []
    placement = device_data.place(
        [one, two], ALL, show=lambda *progress: shown.append(sum(progress[::2]))
    )
    num_bytes = wide.nbytes + 4 * (20 + 2 + 2)
    assert placement.copied_bytes + placement.in_place_bytes == num_bytes
    assert len(shown) > 1
    assert sorted(shown) == shown
    ids = [id(each) for each in jax.tree.leaves([d.arrays for d in placement.data])]
    assert len(set(ids)) == len(ids) - 2
    for given, data in zip((one, two), placement.data, strict=True):
        which = np.array([1, 0])
        expected = jax.tree.leaves(given[which])
        for found, other in zip(
            jax.tree.leaves(data.take(data.arrays, which)), expected, strict=True
        ):
            np.testing.assert_array_equal(found, other)
    elsewhere = device_data.place([one, two], ALL, lambda here: True)
    for refused in (elsewhere, device_data.place([one, two], placement.copied_bytes - 1)):
        assert refused.data is None
        assert "may be used" in refused.reason


def test_aligned_arrays_are_read_in_place():
    memory = np.zeros(1024 + 16, "f4")
    first = -memory.ctypes.data % 64 // 4
    matrix = memory[first : first + 1024].reshape(32, 32)
    columns = matrix[:, 1:, np.newaxis]
    assert device_data.place([Samples(columns, columns)], 0).data is None
    placement = device_data.place([Samples(columns, columns)], 1)
    assert (placement.copied_bytes, placement.in_place_bytes) == (0, 4096)
    (array,) = jax.tree.leaves(placement.data[0].arrays)
    assert array.unsafe_buffer_pointer() == matrix.ctypes.data
    of_a_user = SimpleNamespace()
    assert "on the host" in device_data.place([Samples(of_a_user, of_a_user)], ALL).reason


def test_blocks_grow_to_half_a_second_by_rank_0(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(steps_module.time, "perf_counter", lambda: now[0])
    pace, sizes = steps_module.Pace(COMM), []
    for step_s in [20.0, *6 * [0.03], 0.3, 0.3]:
        sizes.append(pace.num_steps)
        begin_s, now[0] = now[0], now[0] + step_s * pace.num_steps
        pace.wait(pace.num_steps, begin_s, {})
    assert sizes == [1, 1, 2, 4, 8, 16, 16, 16, 1]
    other = SimpleNamespace(broadcast=lambda value: 7)
    pace = steps_module.Pace(other)
    pace.wait(1, now[0] - 1.0, {})
    assert pace.num_steps == 7
