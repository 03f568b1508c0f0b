"""A few of the runs of `make fault-test`."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.datasets.synthetic import ensure
from tests.faults.kill_and_restart import execute_all, is_too_easy, kills_of, summary
from tests.faults.kill_runs import Fault, FaultyRun

pytestmark = [pytest.mark.extended, pytest.mark.parallel, pytest.mark.horovod]

FAULTS = [
    ("mpirun", "rank 1", "STOP", "start"),
    ("candle-p1", "rank 0", "INT", "startup"),
    ("mpirun", "launcher", "KILL", "training"),
    ("candle-p1", "launcher", "HUP", "training"),
    ("mpirun", "launcher", "STOP", "training"),
    ("mpirun", "rank 0", "TERM", "training"),
]
NUM_KILLS = 2


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


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=lambda number: "-".join(FAULTS[number]))
def test_a_run_ends_as_documented(ended, number):
    fault = ended[number]
    print(fault, fault.output, sep="\n")
    assert not fault.problems
    assert fault.period != "training" or fault.status in ("failed", "interrupted")


def test_killed_runs_end_as_if_nobody_had_killed_them(
    mpirun, data_directory, tmp_path, monkeypatch
):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(data_directory))
    runs = execute_all(NUM_KILLS, seed=1, num_jobs=2, directory=tmp_path)
    print(summary(runs))
    assert [problem for run in runs for problem in run.problems] == []
    kills = kills_of(runs)
    assert len(kills) >= NUM_KILLS
    assert sum(kill.num_good for kill in kills) > 0
    assert {run.command.benchmark for run in runs} == {"nt3", "p1b1"}
    assert not is_too_easy(runs)
