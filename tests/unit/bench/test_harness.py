import math
import os
import sys
from dataclasses import dataclass

import pytest

from candle_p1.bench import load, task
from candle_p1.bench.harness import Comparison, Job, rounds
from candle_p1.bench.load import Load
from candle_p1.bench.task import BenchTask
from candle_p1.distributed import devices
from candle_p1.errors import CandleError, DataError, ParameterError, SetupError
from tools.simulated import SimulatedJob


@dataclass(kw_only=True)
class Sort(Comparison):
    def jobs(self):
        return rounds([Job(name, BenchTask()) for name in ("quick | stable", "merge")], 6)


def test_a_report_becomes_a_dated_page_that_does_not_name_the_machine(compare, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/bin/candle-p1", "bench", "sort", "--rounds", "1 2"])
    report = compare(Sort(), lambda task, num: [{"elapsed_s": 2.0}])
    report["machine"] |= {"host": "node7", "cpu": "Z80", "packages": {"keras": "3.9"}}
    page = Sort().markdown(report | {"started": "2026-11-27T10:00:00Z"})
    assert page.startswith("# candle-p1 bench sort --rounds '1 2'\n")
    assert all(fact in page for fact in ("2026-11-27", "Z80", "keras 3.9"))
    assert "node7" not in page
    table = "| variant | median (s) | 95 % interval (s) |\n| --- | ---: | ---: |\n"
    assert f"{table}| quick \\| stable | 2.00 | 2.00 to 2.00 |\n" in page


def test_variants_with_other_values_are_not_compared(compare):
    outcomes = iter([[1, 1], [1, 2]])

    def measure(task, num_ranks):
        return [{"elapsed_s": 1.0, "checked": {"train.csv": value}} for value in next(outcomes)]

    with pytest.raises(DataError, match=r"train.csv: merge \(rank 1\) and quick .* \(rank 0\)"):
        compare(Sort(), measure)


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        ("print('error: no such file'); raise SystemExit(2)", CandleError, "chunked: no such file"),
        ("import os; os.kill(os.getpid(), 9)", SetupError, "chunked: "),
        ("1 / 0", RuntimeError, "ZeroDivisionError"),
    ],
)
def test_a_job_that_fails_ends_the_comparison(monkeypatch, program, error, text):
    monkeypatch.setattr(task, "module_command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(error, match=text) as raised:
        task.run(BenchTask(), 1, "chunked")
    assert type(raised.value) is error


def test_a_measurement_refuses_flags_of_its_own_and_a_launcher(monkeypatch):
    comparison = Load(benchmark="nt3", flags=["--loader", "original"])
    with pytest.raises(ParameterError, match=r"--loader .*--methods"):
        comparison.prepare()
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(ParameterError, match="launcher"):
        comparison.prepare()


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
    assert job.run(lambda comm: load.bind_cores(comm, threads)) == [num] * num_ranks
    assert sorted(found) == cores
