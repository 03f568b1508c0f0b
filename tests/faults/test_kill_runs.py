"""A few of the runs of `make fault-test`, one for each signal."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

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


@pytest.fixture(scope="module")
def ended(mpirun, data_directory, tmp_path_factory):
    """Returns the faults after their runs, of which two at a time are executed."""
    directory = tmp_path_factory.mktemp("faults")
    faults = [Fault(number, *fault, moment_s=1.5) for number, fault in enumerate(FAULTS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANDLE_DATA_DIR", str(data_directory))
        ensure(find_benchmark("nt3").recipe, "small", 2019)
        with ThreadPoolExecutor(2) as pool:
            runs = [FaultyRun(fault, directory / f"{fault.number}") for fault in faults]
            list(pool.map(FaultyRun.execute, runs))
    return faults


@pytest.mark.extended
@pytest.mark.parallel
@pytest.mark.horovod
@pytest.mark.parametrize("number", range(len(FAULTS)), ids=lambda number: "-".join(FAULTS[number]))
def test_a_run_ends_as_documented(ended, number):
    fault = ended[number]
    print(fault, fault.output, sep="\n")
    assert not fault.problems
    assert fault.period != "training" or fault.status in ("failed", "interrupted")


def test_faults_follow_from_the_seed():
    faults = [draw(number, seed=1) for number in range(100)]
    assert faults == [draw(number, seed=1) for number in range(100)]
    assert len({(each.victim, each.signal, each.period) for each in faults}) > 30
