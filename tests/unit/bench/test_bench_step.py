from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from candle_p1.bench import show_step, step
from candle_p1.bench.elsewhere import Elsewhere
from candle_p1.bench.step import StepComparison, StepJob, StepOutcome, difference
from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import FileSet
from candle_p1.distributed.backend import choose_backend
from candle_p1.errors import CandleError, ParameterError

OUTCOME = StepOutcome(
    steps_s=[0.2, 0.1, 0.3],
    losses=[0.7, 0.6, 0.5],
    updates={"kernel": [0.1, -0.2, 0.2], "bias": [0.0, 0.01]},
    values={"kernel": [3.0, 4.0, 0.0], "bias": [0.0, 0.02]},
    batch_size=20,
    threads=2,
    device="cpu",
    backend="tensorflow 2.18.1",
    has_fast_kernels=True,
    flops=6e9,
    state_bytes=5_000_000,
    matrix_bytes=7_000_000,
    roofline={
        "used_flops": 6e9,
        "used_total_s": 0.12,
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

    def compare(measure, benchmark="nt3", flags=(), **conditions):
        file = tmp_path / "train.csv"
        file.write_text("1,2\n")
        jobs = []

        def run(job, num_ranks):
            jobs.append(job)
            return measure(job, num_ranks)

        monkeypatch.setattr(step, "run", run)
        comparison = StepComparison(StepJob(benchmark, list(flags), num_steps=3), **conditions)
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


def test_differences_are_listed_by_weight():
    other = replace(OUTCOME, updates={**OUTCOME.updates}, values={**OUTCOME.values})
    other.updates["bias"] = [0.0, 0.02]
    other.values["kernel"] = [3.0, 3.95, 0.05]
    kernel, bias = difference(other, OUTCOME)["weights"]
    assert kernel == {
        "weight": "kernel",
        "num_compared": 3,
        "update": 0,
        "largest_update": 0,
        "value": pytest.approx(0.05 * np.sqrt(2) / 5),
        "largest_value": pytest.approx(0.05 / 5),
    }
    assert (bias["update"], bias["value"]) == (pytest.approx(1.0), 0)


def test_values_after_different_numbers_of_steps_are_not_compared():
    longer = replace(OUTCOME, steps_s=[0.1] * 4)
    assert all(each["value"] is None for each in difference(OUTCOME, longer)["weights"])


def test_weights_are_listed_on_request(compare):
    report, _ = compare(slower)

    def of_weights(**asked):
        tables = [part for part in show_step.parts(report, **asked) if not isinstance(part, str)]
        return [table for table in tables if table.columns[0].header == "weight"]

    assert of_weights() == []
    (table,) = of_weights(by_weight=True)
    assert list(table.columns[0].cells) == ["kernel", "bias"]


@pytest.mark.parametrize(("flags", "num_calm"), [([], 2), (["--dropout", "0"], 0)])
def test_keras_2_is_measured_in_turn(compare, flags, num_calm):
    report, jobs = compare(slower, num_rounds=1, flags=flags, keras2="/opt/keras2")
    timed, calm = jobs[:3], jobs[3:]
    assert [job.variant for job in timed] == ["as in a run", "plain Keras", "Keras 2"]
    assert [job.keras2 for job in timed] == [None, None, "/opt/keras2"]
    assert timed[2].inputs == "arrays"
    assert all(job.is_random for job in timed)
    assert [(job.variant, job.is_random) for job in calm] == [
        ("as in a run", False),
        ("Keras 2", False),
    ][:num_calm]
    assert report["results"][0]["speedup"]["Keras 2"] == pytest.approx(2)
    assert set(report["differences"]) == {"plain Keras", "Keras 2"}
    assert report["keras2_compared_without"] == ["--dropout 0.1"][: num_calm // 2]
    lines = [part for part in show_step.parts(report) if isinstance(part, str)]
    assert any("without --dropout 0.1" in line for line in lines) == bool(num_calm)


def test_keras_2_must_train_the_same_model(compare):
    def measure(job, num_ranks):
        return [OUTCOME if job.keras2 is None else replace(OUTCOME, losses=[0.7, 0.6, 0.501])]

    with pytest.raises(CandleError, match="Keras 2 trains a different model"):
        compare(measure, keras2="/opt/keras2")


def test_a_job_of_keras_2_finds_it_and_can_be_without_randomness(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    job = StepJob("p1b3", ["--cell_noise_sigma", "0.5"], keras2="/opt/keras2", is_random=False)
    assert job.environment == {"PYTHONPATH": "/opt/keras2:/mine"}
    benchmark = find_benchmark("p1b3")
    random = replace(job, is_random=True).bind(benchmark)
    assert benchmark.random_parameters(random) == ["dropout", "cell_noise_sigma"]
    assert benchmark.random_parameters(job.bind(benchmark)) == []


@pytest.mark.parametrize(
    ("flags", "conditions", "message"),
    [
        ([], {"num_ranks": 2}, "--np"),
        ([], {"against": False}, "--against"),
        (["--engine", "jax"], {}, "TensorFlow"),
    ],
)
def test_keras_2_is_refused_where_it_is_no_peer(monkeypatch, flags, conditions, message):
    monkeypatch.setattr(step, "choose_backend", lambda engine: engine)
    job = StepJob("nt3", ["--size", "small", *flags])
    with pytest.raises(ParameterError, match=message):
        StepComparison(job, keras2="/opt/keras2", **conditions).locate_files()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_tables_show_all_variants(compare, num_ranks):
    report, _ = compare(slower, num_ranks=num_ranks)
    shown = list(show_step.parts(report))
    lines = [part for part in shown if isinstance(part, str)]
    tables = [part for part in shown if not isinstance(part, str)]
    assert all(table.row_count == len(report["results"]) for table in tables)
    assert any("bound of a rank: 120 ms" in line for line in lines)
    assert any("exposed communication" in line for line in lines) == (num_ranks > 1)


@pytest.fixture
def elsewhere(monkeypatch):
    """Another environment, with JAX and without fast kernels, where all takes three times as long.

    Its models begin with other random numbers.
    """
    there = replace(OUTCOME, backend="jax 0.10.2", has_fast_kernels=False, losses=[9.0, 8.0, 7.0])

    def run(self, job, num_ranks):
        of_variant = EXPOSED_S if job.averages_gradients else 0.0
        return [replace(there, steps_s=[0.6 + of_variant] * 3)] * num_ranks

    monkeypatch.setattr(Elsewhere, "run", run)
    monkeypatch.setattr(step, "choose_backend", lambda: "tensorflow")
    return Elsewhere("/opt/jax/bin/python", "jax")


EXPOSED_S = 0.3


def test_another_environment_is_measured_in_turn(compare, elsewhere):
    report, jobs = compare(slower, num_ranks=2, num_rounds=1, other=elsewhere)
    names = ["as in a run", "no allreduce", "one process"]
    found = [result["variant"] for result in report["results"]]
    assert found == [*names, *(f"{name}, jax" for name in names)]
    assert [job.variant for job in jobs] == names  # the others were not measured here
    assert [result["num_ranks"] for result in report["results"]] == [2, 2, 1, 2, 2, 1]
    ratio = report["results"][0]["speedup"]["as in a run, jax"]
    assert ratio == pytest.approx((0.6 + EXPOSED_S) / 0.2)
    assert report["communication"]["exposed_s"] == 0
    assert report["other"]["communication"]["exposed_s"] == pytest.approx(EXPOSED_S)
    lines = [part for part in show_step.parts(report) if isinstance(part, str)]
    assert any("jax 0.10.2, by /opt/jax/bin/python" in line for line in lines)
    assert any("exposed communication, jax: 300 ms" in line for line in lines)


def test_models_are_compared_within_an_environment_only(compare, elsewhere):
    report, _ = compare(slower, num_rounds=1, other=elsewhere)
    assert set(report["differences"]) == {"plain Keras", "plain Keras, jax"}
    lines = [part for part in show_step.parts(report) if isinstance(part, str)]
    assert any("fast kernels are for TensorFlow on CPUs only" in line for line in lines)


def test_the_note_on_kernels_is_for_environments_without_them(compare):
    report, _ = compare(slower, num_rounds=1)
    lines = [part for part in show_step.parts(report) if isinstance(part, str)]
    assert not any("fast kernels" in line for line in lines)


def test_an_environment_of_the_same_backend_has_another_name(elsewhere):
    same = replace(elsewhere, backend="tensorflow")
    names = [job.variant for job in StepComparison(StepJob("nt3", []), other=same).variants()]
    assert names[-1] == "plain Keras, other tensorflow"


def test_one_engine_cannot_be_chosen_for_two_environments(elsewhere):
    job = StepJob("nt3", ["--size", "small", "--engine", "auto"])
    with pytest.raises(ParameterError, match=r"--engine .* --other_python"):
        StepComparison(job, other=elsewhere).locate_files()


def test_an_interpreter_says_what_it_has():
    here = Elsewhere.of(sys.executable)
    assert here == Elsewhere(sys.executable, choose_backend())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (None, "cannot be started"),
        ("#!/bin/sh\necho 'No module named candle_p1' >&2; exit 1\n", "No module named candle_p1"),
        ('#!/bin/sh\necho \'{"version": "0.0.1", "backend": "jax"}\'\n', "has candle_p1 0.0.1"),
    ],
)
def test_an_interpreter_without_this_package_is_refused(tmp_path, program, message):
    python = tmp_path / "python"
    if program:
        python.write_text(program)
        python.chmod(0o755)
    with pytest.raises(ParameterError, match=f"--other_python {python} .*{message}"):
        Elsewhere.of(str(python))


def test_an_error_of_another_environment_is_raised_here():
    with pytest.raises(CandleError, match="'nt3'"):
        Elsewhere(sys.executable, "jax").run(StepJob("nt4", []), 1)
