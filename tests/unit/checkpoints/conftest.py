from __future__ import annotations

import numpy as np
import pytest

from candle_p1.checkpoints.checkpoint import Checkpoint
from candle_p1.checkpoints.root import CheckpointRoot
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.records.types import Position
from tools.simulated import ArrayInMemory


@pytest.fixture
def state():
    """Arrays of several types, one of them without elements and one without dimensions."""
    random = np.random.default_rng(0)
    return {
        "weights/kernel": random.random((700, 50), dtype=np.float32),
        "weights/bias": random.random(50).astype(np.float16),
        "iterations": np.array(12, np.int64),
        "empty": np.empty((0, 4), np.float64),
    }


@pytest.fixture
def said():
    """What writers have said."""
    return []


@pytest.fixture
def root(tmp_path):
    return tmp_path / "ckpts"


@pytest.fixture
def make_writer(root, said):
    """Makes writers of a single process; those still open are closed at the end."""
    writers = []

    def make_writer(**options):
        writers.append(
            CheckpointWriter(SerialCommunicator(), root, **{"say": said.append, **options})
        )
        return writers[-1]

    yield make_writer
    for writer in writers:
        writer.abandon()


@pytest.fixture
def save(state):
    """Saves the state at an epoch's end and waits until it is safe."""

    def save(writer, epoch=1, **options):
        arrays = {name: ArrayInMemory(array) for name, array in state.items()}
        mine = {"seed": np.array([epoch])}
        options = {"wait": True, **options}
        return writer.save(Position(epoch, 0), arrays, mine, {"epoch": epoch}, **options)

    return save


@pytest.fixture
def stored(make_writer, save, root):
    """A directory with checkpoints of the epochs 1, 2 and 3."""
    writer = make_writer()
    for epoch in (1, 2, 3):
        assert save(writer, epoch)
    writer.close()
    return CheckpointRoot(root)


def latest(root):
    """Returns the checkpoint that is linked as the latest."""
    return Checkpoint(root / "latest")
