from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from candle_p1.bench import harness, task
from candle_p1.bench.harness import Comparison, Job, rounds, table
from candle_p1.bench.load import Load
from candle_p1.bench.task import BenchTask
from candle_p1.distributed import backend
from candle_p1.errors import CandleError, DataError, ParameterError, SetupError
from candle_p1.records.tables import as_cells


@dataclass(kw_only=True)
class Sort(Comparison):
    def jobs(self):
        return rounds([Job(name, BenchTask()) for name in ("quick", "merge")], 6)


def test_every_second_round_is_in_reverse_order():
    names = [str(job) for job in rounds([Job("a", None), Job("b", None)], 3)]
    assert names == ["a, time 1", "b, time 1", "b, time 2", "a, time 2", "a, time 3", "b, time 3"]


def test_a_job_takes_as_long_as_its_slowest_rank(compare):
    times = iter(range(12))
    report = compare(Sort(), lambda task, num: [{"elapsed_s": next(times)}, {"elapsed_s": 0.5}])
    quick, merge = report["results"]
    assert quick["repeats_s"] == [0.5, 3, 4, 7, 8, 11]
    assert (merge["median_s"], merge["ci95_s"]) == (5.5, [1, 10])
    assert {"command", "started", "machine"} <= set(report)
    (times,) = Sort().render(report)
    heads, rows = as_cells(times)
    assert heads == ["variant", "median (s)", "95 % interval (s)"]
    assert rows == [("quick", "5.50", "0.500 to 11.0"), ("merge", "5.50", "1.00 to 10.0")]


@pytest.mark.parametrize("wrong", [0, 1])
def test_variants_with_other_values_are_not_compared(compare, wrong):
    outcomes = iter([[1, 1], [1 + (wrong == 0), 1 + (wrong == 1)]])

    def measure(task, num_ranks):
        return [{"elapsed_s": 1.0, "checked": {"train.csv": value}} for value in next(outcomes)]

    with pytest.raises(DataError, match=rf"train.csv: merge \(rank {wrong}\) and quick \(rank 0\)"):
        compare(Sort(), measure)


def test_cells_show_three_digits_and_what_is_missing():
    columns = {"a": "a", "b": lambda row: row["b"], "c": "c"}
    row = {"a": 1234.5, "b": None, "c": 12345}
    assert as_cells(table([row], columns))[1] == [("1,234", "not measured", "12345")]
    assert harness.format_significant(0.012345) == "0.0123"


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        ("print('error: no such file'); raise SystemExit(2)", CandleError, "chunked: no such file"),
        ("import os; os.kill(os.getpid(), 9)", SetupError, "chunked: "),
        ("1 / 0", RuntimeError, "ZeroDivisionError"),
        (
            "import os; print('error:', os.environ['KERAS_BACKEND']); raise SystemExit(2)",
            CandleError,
            "chunked: jax",
        ),
    ],
)
def test_a_job_that_fails_ends_the_comparison(monkeypatch, program, error, text):
    monkeypatch.setattr(backend, "find_spec", lambda name: name if name == "jax" else None)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "")
    monkeypatch.setattr(task, "module_command", lambda module: [sys.executable, "-c", program])
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
