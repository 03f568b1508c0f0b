"""A few of the runs of `make fault-test`, one for each signal."""

from __future__ import annotations

import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.datasets.synthetic import ensure
from tests.faults.kill_runs import Fault, FaultyRun, draw

FAULTS = [
    ("mpirun", "rank 1", "STOP", "start"),
    ("candle-p1", "rank 0", "INT", "startup"),
    ("mpirun", "launcher", "KILL", "training"),
    ("candle-p1", "launcher", "HUP", "training"),
    ("mpirun", "launcher", "STOP", "training"),
    ("mpirun", "rank 0", "TERM", "training"),
]


@pytest.mark.extended
@pytest.mark.parallel
@pytest.mark.parametrize(("starter", "victim", "name", "period"), FAULTS)
def test_a_run_ends_as_documented(mpirun, environment, tmp_path, starter, victim, name, period):
    ensure(find_benchmark("nt3").recipe, "small", 2019)
    fault = Fault(0, starter, victim, name, period, moment_s=1.5)
    FaultyRun(fault, tmp_path / "job").execute()
    print(fault, fault.output, sep="\n")
    assert not fault.problems
    assert period != "training" or fault.status in ("failed", "interrupted")


def test_faults_follow_from_the_seed():
    faults = [draw(number, seed=1) for number in range(100)]
    assert faults == [draw(number, seed=1) for number in range(100)]
    assert len({(each.victim, each.signal, each.period) for each in faults}) > 30
