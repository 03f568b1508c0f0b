from __future__ import annotations

import numpy as np
import pytest

from candle_p1.checkpoints.manifest import Position
from candle_p1.checkpoints.root import CheckpointRoot
from candle_p1.checkpoints.source import ArrayInMemory
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import SerialCommunicator


@pytest.fixture
def state():
    random = np.random.default_rng(0)
    return {
        "weights/kernel": random.random((700, 50), dtype=np.float32),
        "weights/bias": random.random(50).astype(np.float16),
        "iterations": np.array(12, np.int64),
        "empty": np.empty((0, 4), np.float64),
    }


def sources(state):
    return {name: ArrayInMemory(array) for name, array in state.items()}


@pytest.fixture
def writer(tmp_path):
    writer = CheckpointWriter(SerialCommunicator(), tmp_path / "ckpts", say=pytest.fail)
    yield writer
    writer.close()


def test_what_is_saved_is_read(writer, state, tmp_path):
    seed = np.arange(4, dtype=np.uint32)
    assert writer.save(Position(2, 30), sources(state), {"seed": seed}, {"loss": [0.5]}, wait=True)

    checkpoint = CheckpointRoot(tmp_path / "ckpts").newest_good(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.directory.name == "epoch-0002-step-000030"
    assert checkpoint.position == Position(2, 30)
    assert checkpoint.facts == {"loss": [0.5]}
    assert checkpoint.arrays.keys() == state.keys()
    for name, array in state.items():
        values = checkpoint.read(name)
        assert values.dtype == array.dtype
        np.testing.assert_array_equal(values, array)
    np.testing.assert_array_equal(checkpoint.rank_state(0)["seed"], seed)
    assert checkpoint.rank_state(1) == {}


def test_a_save_is_of_the_moment_it_was_called(writer, state, tmp_path):
    before = state["weights/kernel"].copy()
    writer.save(Position(1, 0), sources(state), {}, {})
    state["weights/kernel"][:] = 0
    statistics = writer.close()
    assert [save.name for save in statistics.written] == ["epoch-0001-step-000000"]
    latest = CheckpointRoot(tmp_path / "ckpts").latest()
    np.testing.assert_array_equal(latest.read("weights/kernel"), before)
