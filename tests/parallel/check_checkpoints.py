"""Checkpoints that several ranks write: on every layout of ranks on nodes they hold the same."""

import errno
import os
import time

import numpy as np
import pytest
import safetensors.numpy
from harness import shared_directory

from candle_p1.checkpoints import commit, shards
from candle_p1.checkpoints.checkpoint import CheckpointRoot
from candle_p1.checkpoints.shards import write_synced
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.errors import CheckpointError
from candle_p1.records.types import Position
from tools.simulated import ArrayInMemory

shards.SMALL_BYTES, shards.LARGE_BYTES = 1000, 0
STATE = {
    "weights/large": np.random.default_rng(1).random((4001, 33), dtype=np.float32),
    "weights/small": np.arange(7, dtype=np.float16),
    "iterations": np.array(3, np.int64),
}


def save(writer, comm, epoch, **options):
    arrays = {name: ArrayInMemory(array + epoch) for name, array in STATE.items()}
    mine = {"seed": np.array([comm.rank, epoch])}
    options = {"wait": True, **options}
    return writer.save(Position(epoch, 0), arrays, mine, {"epoch": epoch}, **options)


def holds_epoch(checkpoint, comm, epoch):
    """Makes sure that a checkpoint, known on rank 0, is the state of an epoch on every rank."""
    if comm.rank == 0:
        assert checkpoint.position == Position(epoch, 0)
        assert checkpoint.num_ranks == comm.size
        for name, array in STATE.items():
            np.testing.assert_array_equal(checkpoint.read(name), array + epoch)
        seeds = [state["seed"].tolist() for state in checkpoint.rank_states()]
        assert seeds == [[rank, epoch] for rank in range(comm.size)]


def newest_good(root, comm):
    return CheckpointRoot(root).newest_good(pytest.fail) if comm.rank == 0 else None


def all_writers_write_equal_shares(comm):
    """A small state is written by rank 0's node, a large one by all nodes."""
    root = shared_directory(comm)
    on_first_node = comm.allgather(comm.node).count(0)
    for epoch, large_bytes, expected in ((1, 10**9, on_first_node), (2, 0, comm.size)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "LARGE_BYTES", large_bytes)
            writer = CheckpointWriter(comm, root)
            assert save(writer, comm, epoch, best=epoch == 1)
        checkpoint = newest_good(root, comm)
        holds_epoch(checkpoint, comm, epoch)
        if comm.rank == 0:
            files = sorted(checkpoint.directory.glob("arrays-*"))
            assert len(files) == expected
            sizes = [path.stat().st_size for path in files]
            assert max(sizes) - min(sizes) < 1000
            found = [name for path in files for name in safetensors.numpy.load_file(path)]
            assert len(found) == len(set(found)) == len(STATE) - 1 + expected
        assert all(each.written_s > 0 for each in writer.close().saves)


def a_rank_that_fails_ends_the_checkpoint_for_all(comm):
    root, said = shared_directory(comm), []
    writer = CheckpointWriter(comm, root, say=said.append)
    assert save(writer, comm, 1)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(commit, "write_synced", full_disk)
        assert not save(writer, comm, 2)
    assert save(writer, comm, 3)
    assert len(writer.close().errors) == 1
    holds_epoch(newest_good(root, comm), comm, 3)
    if comm.rank == 0:
        assert [os.strerror(errno.ENOSPC) in each for each in said] == [True]
        assert not list(root.glob(".*"))


def full_disk(path, *_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def a_required_checkpoint_that_fails_ends_all_ranks(comm):
    root = shared_directory(comm)
    writer = CheckpointWriter(comm, root, required=True)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(commit, "write_synced", full_disk)
        assert save(writer, comm, 1, wait=False)
        with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)) as caught:
            save(writer, comm, 2)
    assert caught.value.agreed
    assert len(writer.close().errors) == 1


def one_slow_rank_is_waited_for_and_not_overtaken(comm):
    root, said = shared_directory(comm), []
    writer = CheckpointWriter(comm, root, say=said.append)

    def slow(*args):
        time.sleep(2 * (comm.rank == comm.size - 1))
        return write_synced(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "write_synced", slow)
        assert save(writer, comm, 1, wait=False)
        assert not save(writer, comm, 2, wait=False)
        if comm.rank == 0:
            assert CheckpointRoot(root).names() == []
            assert len(said) == 1
        statistics = writer.close()
    assert statistics.num_not_taken == 1
    holds_epoch(newest_good(root, comm), comm, 1)


CHECKS = (
    all_writers_write_equal_shares,
    a_rank_that_fails_ends_the_checkpoint_for_all,
    a_required_checkpoint_that_fails_ends_all_ranks,
    one_slow_rank_is_waited_for_and_not_overtaken,
)
