"""Who writes; what that costs in large jobs is in tests/unit/tools/test_scale.py."""

import os

import pytest

from candle_p1.checkpoints import arrays, planner
from candle_p1.checkpoints.arrays import ArraySpec
from candle_p1.checkpoints.planner import ShardPlanner
from tools.simulated import SimulatedJob


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Returns the ranks that write so many bytes, in a job with a file as a sign."""
    monkeypatch.setattr(arrays, "SMALL_BYTES", 1000)
    monkeypatch.setattr(planner, "LARGE_BYTES", 100_000)
    monkeypatch.setattr(planner, "APPEAR_S", 0.0)

    def plan(num_bytes, num_ranks, sign=tmp_path):
        specs = {"x": ArraySpec("uint8", (num_bytes,))}
        job = SimulatedJob(num_ranks, ranks_per_node=num_ranks // 2)
        (found,) = set(job.run(lambda comm: ShardPlanner(comm, sign).plan(specs).ranks))
        return found

    return plan


@pytest.mark.parametrize(
    ("num_bytes", "ranks"),
    [(100_001, (0, 1, 2, 3, 4, 5, 6, 7)), (100_000, (0, 1, 2, 3)), (2_000, (0, 2)), (0, (0,))],
)
def test_few_bytes_are_written_by_few_ranks_and_many_by_all_nodes(plan, num_bytes, ranks):
    assert plan(num_bytes, 8) == ranks


def test_nodes_that_do_not_see_the_directory_write_nothing(plan, tmp_path, monkeypatch):
    assert plan(10**6, 4, None) == plan(10**6, 4, tmp_path / "missing") == (0, 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert plan(10**6, 4) == (0, 1)
