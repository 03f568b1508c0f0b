from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from candle_p1.bench import show_step, step
from candle_p1.bench.step import StepComparison, StepJob, StepOutcome, difference
from candle_p1.data.reader import FileSet
from candle_p1.errors import CandleError

OUTCOME = StepOutcome(
    steps_s=[0.2, 0.1, 0.3],
    losses=[0.7, 0.6, 0.5],
    updates={"kernel": [0.1, -0.2, 0.2], "bias": [0.0, 0.01]},
    batch_size=20,
    threads=2,
    device="cpu",
    flops=6e9,
    state_bytes=5_000_000,
    matrix_bytes=7_000_000,
    roofline={
        "flops": 6e9,
        "matmul_flops_per_s": 100e9,
        "products_s": 0.06,
        "optimizer_bytes": 3e9,
        "copy_bytes_per_s": 50e9,
        "optimizer_s": 0.06,
        "total_s": 0.12,
    },
    memory=[(0.0, 100), (1.0, 900)],
)


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Compares with jobs whose outcomes a function (job, num_ranks) -> list of outcomes returns."""

    def compare(measure, benchmark="nt3", **conditions):
        file = tmp_path / "train.csv"
        file.write_text("1,2\n")
        jobs = []

        def run(job, num_ranks):
            jobs.append(job)
            return measure(job, num_ranks)

        monkeypatch.setattr(step, "run", run)
        comparison = StepComparison(StepJob(benchmark, [], num_steps=3), **conditions)
        return comparison.measure(FileSet.of({"train": file}), lambda *progress: None), jobs

    return compare


def slower(job, num_ranks, times=2.0):
    factor = times if job.kernels == "plain" else 1.0
    steps = [factor * seconds for seconds in OUTCOME.steps_s]
    return [replace(OUTCOME, steps_s=steps)] * num_ranks


def test_plain_keras_is_measured_in_turn_with_ours(compare):
    report, jobs = compare(slower, num_rounds=2)
    in_order = ["as in a run", "plain Keras"]
    assert [job.variant for job in jobs] == [*in_order, *reversed(in_order)]
    assert [job.measures_machine for job in jobs] == [True, True, False, False]
    ours, plain = report["results"]
    assert (plain["kernels"], plain["inputs"]) == ("plain", "arrays")
    assert ours["median_s"] == pytest.approx(0.2)
    assert ours["repeats"] == 6
    assert ours["speedup"] == {"plain Keras": pytest.approx(2.0)}
    assert ours["samples_per_s"] == pytest.approx(100)
    assert ours["flops_per_s"] == pytest.approx(30e9)
    assert ours["peak_bytes"] == 900


def test_other_samples_of_a_benchmark_are_compared(compare):
    _, jobs = compare(slower, "p1b3", num_rounds=1)
    assert [job.inputs for job in jobs] == ["samples", "arrays", "merged"]


def test_several_ranks_are_compared_with_one_process_and_with_no_allreduce(compare):
    def measure(job, num_ranks):
        seconds = {"as in a run": 0.4, "no allreduce": 0.3, "one process": 0.25}[job.variant]
        slowest = replace(OUTCOME, steps_s=[seconds] * 3)
        faster = replace(OUTCOME, steps_s=[seconds / 2] * 3)
        return [faster] * (num_ranks - 1) + [slowest]

    report, jobs = compare(measure, num_ranks=2, num_rounds=1)
    assert [job.averages_gradients for job in jobs] == [True, False, True]
    assert [result["num_ranks"] for result in report["results"]] == [2, 2, 1]
    assert report["communication"]["exposed_s"] == pytest.approx(0.1)
    assert report["communication"]["share"] == pytest.approx(0.25)
    ours = report["results"][0]
    assert ours["samples_per_s"] == pytest.approx(40 / 0.4)
    assert ours["speedup"]["one process"] == pytest.approx((40 / 0.4) / (20 / 0.25))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"losses": [0.7, 0.6, 0.501]}, "loss"),
        ({"losses": [0.7, 0.6, float("nan")]}, "loss"),
        ({"updates": {"kernel": [0.1, -0.2, 0.21], "bias": [0.0, 0.01]}}, "update"),
    ],
)
def test_variants_that_train_another_model_are_not_compared(compare, change, what):
    def measure(job, num_ranks):
        return [replace(OUTCOME, **change) if job.kernels == "plain" else OUTCOME]

    with pytest.raises(CandleError, match=f"plain Keras .*{what}"):
        compare(measure)


def test_differences_are_relative():
    other = replace(OUTCOME, losses=[0.7, 0.6006, 0.5], updates={**OUTCOME.updates})
    other.updates["kernel"] = [0.1, -0.2, 0.2003]
    found = difference(OUTCOME, other)
    assert found["loss"] == pytest.approx(0.001, rel=1e-2)
    norm = np.linalg.norm(other.updates["kernel"])
    assert found["update"] == pytest.approx(0.0003 / norm, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_tables_show_all_variants(compare, num_ranks):
    report, _ = compare(slower, num_ranks=num_ranks)
    shown = list(show_step.parts(report))
    lines = [part for part in shown if isinstance(part, str)]
    tables = [part for part in shown if not isinstance(part, str)]
    assert all(table.row_count == len(report["results"]) for table in tables)
    assert any("bound of a rank: 120 ms" in line for line in lines)
    assert any("exposed communication" in line for line in lines) == (num_ranks > 1)
