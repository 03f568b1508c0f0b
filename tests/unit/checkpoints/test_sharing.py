"""Who writes, also in jobs of a thousand ranks."""

from __future__ import annotations

import numpy as np
import pytest

from candle_p1.checkpoints import layout, sharing
from candle_p1.checkpoints.layout import ArraySpec
from candle_p1.checkpoints.manifest import Position
from candle_p1.checkpoints.root import CheckpointRoot
from candle_p1.checkpoints.sharing import Sharing
from candle_p1.checkpoints.source import ArrayInMemory
from candle_p1.checkpoints.writer import CheckpointWriter
from tools.simulated import WHOLE_RUN, SimulatedJob

STATE = np.arange(64_000, dtype=np.float32).reshape(640, 100)


@pytest.fixture(autouse=True)
def small_bytes(monkeypatch):
    for module in (layout, sharing):
        monkeypatch.setattr(module, "SMALL_BYTES", 1000)


def test_the_faster_of_two_ways_is_chosen(tmp_path):
    (tmp_path / "sign").touch()

    def work(comm):
        return Sharing(comm, tmp_path / "sign", "auto", pytest.fail)

    for faster, node, everyone in [("node", 2e9, 1e9), ("all", 1e9, 2e9)]:
        found = SimulatedJob(4, ranks_per_node=2).run(work)[0]
        assert found.choose() == found.first == "node"
        found.measured("node", node)
        assert found.choose() == "all"
        found.measured("all", everyone)
        assert found.choose() == faster


def test_a_way_that_failed_is_avoided_while_the_other_works(tmp_path):
    (tmp_path / "sign").touch()

    def work(comm):
        return Sharing(comm, tmp_path / "sign", "auto", pytest.fail)

    found = SimulatedJob(4, ranks_per_node=2).run(work)[0]
    found.failed("node")
    assert found.choose() == "all"
    found.measured("all", 1e9)
    assert found.choose() == "all"
    found.failed("all")
    assert found.choose() == "node", "which may work by now"
    found.measured("node", 5e8)
    assert found.choose() == "all", "which is faster and failed no more often"
    found.failed("all")
    assert found.choose() == "node"


def test_the_only_way_is_tried_again_after_it_failed(tmp_path):
    (tmp_path / "sign").touch()

    def work(comm):
        return Sharing(comm, tmp_path / "sign", "node", pytest.fail)

    found = SimulatedJob(2).run(work)[0]
    found.failed("node")
    assert found.choose() == "node"


def test_if_another_node_cannot_write_the_first_goes_on(tmp_path):
    said = []

    def refuse():
        raise MemoryError

    def work(comm):
        writer = CheckpointWriter(comm, tmp_path, writers="auto", say=said.append)
        if comm.rank == 3:
            writer._allocate = refuse
        arrays = {"weights": ArrayInMemory(STATE)}
        safe = [writer.save(Position(n, 0), arrays, {}, {}, wait=True) for n in (1, 2, 3, 4)]
        writer.close()
        return safe

    safe = SimulatedJob(4, ranks_per_node=2).run(work)[0]
    assert safe == [True, False, True, True]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("mode", "num_bytes", "ranks"),
    [
        ("node", 400_000, (0, 1, 2, 3)),
        ("all", 400_000, (0, 1, 2, 3, 4, 5, 6, 7)),
        ("all", 4_000, (0, 2, 4, 6)),
        ("all", 40, (0,)),
        ("all", 0, (0,)),
    ],
)
def test_few_bytes_are_written_by_few_ranks(tmp_path, mode, num_bytes, ranks):
    (tmp_path / "sign").touch()

    def work(comm):
        sharing = Sharing(comm, tmp_path / "sign", mode, pytest.fail)
        return sharing.plan({"x": ArraySpec("uint8", (num_bytes,))}, mode).ranks

    assert set(SimulatedJob(8, ranks_per_node=4).run(work)) == {ranks}


def test_without_a_directory_only_the_first_node_writes(monkeypatch):
    monkeypatch.setattr(sharing, "_appears", pytest.fail)

    def work(comm):
        return Sharing(comm, None, "all", pytest.fail).plan({}, "all").ranks

    assert set(SimulatedJob(4, ranks_per_node=2).run(work)) == {(0,)}


def received_by_a_rank(num_ranks, root):
    """Returns the largest number of messages and bytes that a rank other than 0 receives."""

    def work(comm):
        writer = CheckpointWriter(comm, root, writers="all", say=pytest.fail)
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
    np.testing.assert_array_equal(checkpoint.rank_state(127)["seed"], [127])
