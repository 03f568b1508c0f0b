"""What the ranks of measuring jobs share."""

from __future__ import annotations

import math
import os

import pytest

from candle_p1.bench import task
from candle_p1.distributed import devices
from tools.simulated import SimulatedJob


@pytest.fixture
def bound(monkeypatch):
    """Binds the ranks of a node of four cores; returns the threads and the cores of each.

    The cores are [] for a rank that is not bound.
    """

    def bound(num_ranks, threads):
        cores = []
        monkeypatch.setattr(devices, "available_cores", lambda: [0, 1, 2, 3])
        monkeypatch.setattr(devices, "core_quota", lambda: math.inf)
        monkeypatch.setattr(os, "sched_setaffinity", lambda process, mine: cores.append(mine))
        monkeypatch.delenv("OMP_PROC_BIND", raising=False)
        threads = SimulatedJob(num_ranks, num_ranks).run(
            lambda comm: task.bind_cores(comm, threads)
        )
        return threads, sorted(cores)

    return bound


@pytest.mark.parametrize(
    ("num_ranks", "threads", "num", "cores"),
    [
        (1, 0, 4, [[0, 1, 2, 3]]),
        (1, 1, 1, [[0]]),
        (2, 0, 2, [[0, 1], [2, 3]]),
        (2, 1, 1, [[0], [2]]),
        (4, 1, 1, [[0], [1], [2], [3]]),
        (8, 1, 1, []),
        (2, 4, 4, []),
    ],
)
def test_a_rank_has_a_core_for_each_of_its_threads(bound, num_ranks, threads, num, cores):
    assert bound(num_ranks, threads) == ([num] * num_ranks, cores)
