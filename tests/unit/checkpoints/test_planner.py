"""Who writes, also in jobs of a thousand ranks."""

from __future__ import annotations

import os

import numpy as np
import pytest

from candle_p1.checkpoints import arrays, planner
from candle_p1.checkpoints.arrays import ArraySpec
from candle_p1.checkpoints.planner import ShardPlanner
from candle_p1.checkpoints.root import CheckpointRoot
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.records.types import Position
from tools.simulated import WHOLE_RUN, ArrayInMemory, SimulatedJob

STATE = np.arange(64_000, dtype=np.float32).reshape(640, 100)


@pytest.fixture(autouse=True)
def small_bytes(monkeypatch):
    monkeypatch.setattr(arrays, "SMALL_BYTES", 1000)
    monkeypatch.setattr(planner, "LARGE_BYTES", 100_000)


@pytest.mark.parametrize(
    ("num_bytes", "ranks"),
    [
        (100_001, (0, 1, 2, 3, 4, 5, 6, 7)),
        (100_000, (0, 1, 2, 3)),
        (2_000, (0, 2)),
        (40, (0,)),
        (0, (0,)),
    ],
)
def test_few_bytes_are_written_by_few_ranks_and_many_by_all_nodes(tmp_path, num_bytes, ranks):
    (tmp_path / "sign").touch()

    def work(comm):
        specs = {"x": ArraySpec("uint8", (num_bytes,))}
        return ShardPlanner(comm, tmp_path / "sign").plan(specs).ranks

    assert set(SimulatedJob(8, ranks_per_node=4).run(work)) == {ranks}


@pytest.mark.parametrize("sign", ["missing", "read-only", None])
def test_nodes_that_do_not_see_the_directory_write_nothing(tmp_path, monkeypatch, sign):
    monkeypatch.setattr(planner, "APPEAR_S", 0.0)
    if sign == "read-only":
        (tmp_path / sign).touch()
        monkeypatch.setattr(os, "access", lambda path, mode: False)

    def work(comm):
        specs = {"x": ArraySpec("uint8", (1_000_000,))}
        return ShardPlanner(comm, sign and tmp_path / sign).plan(specs).ranks

    assert set(SimulatedJob(4, ranks_per_node=2).run(work)) == {(0, 1)}


def received_by_a_rank(num_ranks, root):
    """Returns the largest number of messages and bytes that a rank other than 0 receives."""

    def work(comm):
        writer = CheckpointWriter(comm, root, say=pytest.fail)
        for epoch in (1, 2):
            arrays = {"weights": ArrayInMemory(STATE + epoch)}
            seed = np.array([comm.rank])
            assert writer.save(Position(epoch, 0), arrays, {"seed": seed}, {}, wait=True)
        writer.close()

    job = SimulatedJob(num_ranks, ranks_per_node=8)
    job.run(work)
    return job.traffic[WHOLE_RUN][1:].max(axis=0)


def test_what_a_rank_receives_hardly_grows_with_the_number_of_ranks(tmp_path):
    few = received_by_a_rank(16, tmp_path / "few")
    many = received_by_a_rank(128, tmp_path / "many")
    assert many[0] <= few[0] * 7 / 4  # as the logarithm of the number of ranks
    assert many[1] <= few[1] * 7 / 4 + 512
    checkpoint = CheckpointRoot(tmp_path / "many").newest_good(pytest.fail)
    assert len(list(checkpoint.directory.glob("arrays-*"))) == 128
    np.testing.assert_array_equal(checkpoint.read("weights"), STATE + 2)
    assert [state["seed"] for state in checkpoint.rank_states()] == list(range(128))
