from __future__ import annotations

import math
import os

import pytest

from candle_p1.bench import task
from candle_p1.distributed import devices
from tools.simulated import SimulatedJob


@pytest.mark.parametrize(
    ("num_ranks", "threads", "num", "cores"),
    [
        (1, 0, 4, [[0, 1, 2, 3]]),
        (2, 0, 2, [[0, 1], [2, 3]]),
        (2, 1, 1, [[0], [2]]),
        (8, 1, 1, []),  # too many for the four cores: they are not bound
        (2, 4, 4, []),
    ],
)
def test_a_rank_has_a_core_for_each_of_its_threads(monkeypatch, num_ranks, threads, num, cores):
    found = []
    monkeypatch.setattr(devices, "available_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(devices, "core_quota", lambda: math.inf)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, mine: found.append(mine))
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    job = SimulatedJob(num_ranks, num_ranks)
    assert job.run(lambda comm: task.bind_cores(comm, threads)) == [num] * num_ranks
    assert sorted(found) == cores
