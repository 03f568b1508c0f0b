import os

import numpy as np
import pytest

from candle_p1.checkpoints.checkpoint import Checkpoint, CheckpointRoot
from candle_p1.checkpoints.manifest import name_of
from candle_p1.checkpoints.shards import TYPE_NAMES, ArraySpec
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.records.types import Position
from tools.simulated import ArrayInMemory


@pytest.fixture
def state():
    """Arrays of all types, one of them without elements and one without dimensions."""
    random = np.random.default_rng(0)
    few = {name: random.integers(0, 2, (3, 5)) for name in TYPE_NAMES}
    return {
        "weights/kernel": random.random((700, 50), dtype=np.float32),
        "iterations": np.array(12, np.int64),
        "empty": np.empty((0, 4), np.float64),
        **{name: each.astype(ArraySpec(name, ()).numpy_type) for name, each in few.items()},
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
    writers, comm = [], SerialCommunicator()

    def make_writer(**options):
        writers.append(CheckpointWriter(comm, root, **{"say": said.append, **options}))
        return writers[-1]

    yield make_writer
    for writer in writers:
        writer.abandon()


def sources(state):
    return {name: ArrayInMemory(array) for name, array in state.items()}


@pytest.fixture
def save(state):
    """Saves the state at an epoch's end and waits until it is safe."""

    def save(writer, epoch=1, **options):
        mine, facts = {"seed": np.array([epoch])}, {"epoch": epoch}
        options = {"wait": True, **options}
        return writer.save(Position(epoch, 0), sources(state), mine, facts, **options)

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


def named(epoch):
    """Returns the name of the first checkpoint of the end of an epoch."""
    return name_of(Position(epoch, 0))


def failing(code):
    """Returns a function that fails with the number of an error of the operating system."""

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail
