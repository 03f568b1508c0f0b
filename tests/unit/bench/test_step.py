from __future__ import annotations

import sys

import numpy as np
import pytest

from candle_p1.bench import step
from candle_p1.bench.step import Step, difference
from candle_p1.bench.step_task import StepTask
from candle_p1.bench.task import BenchTask, OtherEnvironment, run
from candle_p1.distributed.backend import choose_backend
from candle_p1.errors import CandleError, ParameterError

PLAIN = ("plain Keras", "plain", "arrays")
NAMES = ("flops", "used_flops", "matmul_flops_per_s", "gemm_s", "optimizer_bytes", "optimizer_s")
ROOFLINE = dict.fromkeys((*NAMES, "copy_bytes_per_s"), 1e9) | {"total_s": 0.12}
OUTCOME = {
    "steps_s": [0.2, 0.1, 0.3],
    "losses": [0.7, 0.6, 0.5],
    "updates": {"kernel": [0.1, -0.2, 0.2], "bias": [0.0, 0.01]},
    "values": {"kernel": [3.0, 4.0, 0.0], "bias": [0.0, 0.02]},
    **{"batch_size": 20, "threads": 2, "device": "cpu", "backend": "tensorflow 2.18.1"},
    **{"has_fast_kernels": True, "flops": 6e9, "state_bytes": 5_000_000},
    **{"matrix_bytes": 7_000_000, "roofline": ROOFLINE},
    "memory": [(0.0, 100), (1.0, 900)],
}


@pytest.fixture
def steps(compare):
    """Returns the report, the tasks, and the lines and tables that show it."""

    def steps(measure, benchmark="nt3", other=None, **conditions):
        tasks = []
        ours = Step(benchmark=benchmark, num_steps=3, **conditions)
        ours.other = other

        def here(task, num_ranks):
            tasks.append(task)
            return measure(task, num_ranks)

        report = compare(ours, here, there=on_jax)
        shown = list(ours.render(report))
        lines = "\n".join(part for part in shown if isinstance(part, str))
        return report, tasks, lines, [part for part in shown if not isinstance(part, str)]

    return steps


def slower(task, num_ranks, times=2.0):
    factor = times if task.kernels == "plain" else 1.0
    steps = [factor * seconds for seconds in OUTCOME["steps_s"]]
    return [OUTCOME | {"steps_s": steps}] * num_ranks


def test_plain_keras_is_measured_in_turn_with_ours(steps):
    report, tasks, lines, tables = steps(slower, num_rounds=2)
    assert [task.kernels for task in tasks] == ["fast", "plain", "plain", "fast"]
    assert [task.measures_memory for task in tasks] == [True, True, False, False]
    assert [task.measures_bound for task in tasks] == [True, False, False, False]
    ours, plain = report["results"]
    assert (plain["variant"], plain["kernels"], plain["inputs"]) == PLAIN
    assert (ours["median_s"], ours["repeats"], ours["peak_bytes"]) == (0.2, 6, 900)
    assert ours["speedup"] == {"plain Keras": pytest.approx(2.0)}
    assert (ours["samples_per_s"], ours["flops_per_s"]) == pytest.approx((100, 30e9))
    assert "fast kernels" not in lines
    heads = [table.columns[0].header for table in tables]
    assert list(tables[heads.index("roofline bound\nof a rank")].columns[1].cells) == ["120"]
    assert "weight" not in heads
    # P1B3's samples can also be arrays, and merged.
    _, tasks, _, tables = steps(slower, "p1b3", num_rounds=1, by_weight=True)
    assert [task.inputs for task in tasks] == ["samples", "arrays", "merged"]
    found = [table for table in tables if table.columns[0].header == "weight"]
    assert [list(table.columns[0].cells) for table in found] == [["kernel", "bias"]] * 2


@pytest.mark.parametrize(
    ("keras2", "change", "what"),
    [
        (None, {"losses": [0.7, 0.6, float("nan")]}, "loss"),
        (None, {"updates": {"kernel": [0.1, -0.2, 0.21], "bias": [0.0, 0.01]}}, "update"),
        ("/opt/keras2", {"losses": [0.7, 0.6, 0.501]}, "loss"),
    ],
)
def test_variants_that_train_another_model_are_not_compared(steps, keras2, change, what):
    def measure(task, num_ranks):
        is_other = task.keras2 == keras2 and task.kernels == "plain"
        return [OUTCOME | change if is_other else OUTCOME]

    with pytest.raises(CandleError, match=f"{'Keras 2' if keras2 else 'plain Keras'} .*{what}"):
        steps(measure, keras2=keras2)


def test_differences_are_relative_and_listed_by_weight():
    updates = OUTCOME["updates"] | {"bias": [0.0, 0.02]}
    other = {"values": OUTCOME["values"] | {"kernel": [3.0, 3.95, 0.05]}, "updates": updates}
    found = difference(OUTCOME | other | {"losses": [0.7, 0.6006, 0.5]}, OUTCOME)
    kernel, bias = found["weights"]
    assert (found["loss"], found["update"]) == pytest.approx((0.001, 1.0))
    assert (kernel["weight"], kernel["num_compared"]) == ("kernel", 3)
    names = ("update", "largest_update", "value", "largest_value")
    values = [kernel[name] for name in names]
    assert values == pytest.approx([0, 0, 0.05 * np.sqrt(2) / 5, 0.05 / 5])
    assert (bias["update"], bias["value"]) == (pytest.approx(1.0), 0)
    longer = OUTCOME | {"steps_s": [0.1] * 4}
    assert all(each["value"] is None for each in difference(OUTCOME, longer)["weights"])


@pytest.mark.parametrize(("flags", "num_deterministic"), [([], 2), (["--dropout", "0"], 0)])
def test_keras_2_is_measured_in_turn(steps, flags, num_deterministic):
    directory = "/opt/keras2"
    report, tasks, lines, _ = steps(slower, num_rounds=1, flags=flags, keras2=directory)
    timed, rest = tasks[:3], tasks[3:]
    inputs = [(None, "samples"), (None, "arrays"), (directory, "arrays")]
    assert [(task.keras2, task.inputs) for task in timed] == inputs
    assert all(task.is_random for task in timed)
    deterministic = [(None, False, 1), (directory, False, 1)][:num_deterministic]
    assert [(task.keras2, task.is_random, task.num_steps) for task in rest] == deterministic
    assert report["results"][0]["speedup"]["Keras 2"] == pytest.approx(2)
    assert set(report["differences"]) == {"plain Keras", "Keras 2"}
    assert report["keras2_compared_without"] == ["--dropout 0.1"][: num_deterministic // 2]
    assert ("without --dropout 0.1" in lines) == bool(num_deterministic)


EXPOSED_S = 0.3


def on_jax(task, num_ranks):
    """Another environment, which is slower, and whose models begin with other random numbers."""
    there = {"backend": "jax 0.10.2", "has_fast_kernels": False, "losses": [9.0, 8.0, 7.0]}
    seconds = 0.6 + EXPOSED_S * task.averages_gradients
    return [OUTCOME | there | {"steps_s": [seconds] * 3}] * num_ranks


@pytest.fixture
def jax(monkeypatch):
    monkeypatch.setattr(step, "choose_backend", lambda: "tensorflow")
    return OtherEnvironment("/opt/jax/bin/python", "jax")


def test_ranks_are_compared_with_one_process_no_allreduce_and_another_environment(steps, jax):
    def measure(task, num_ranks):
        seconds = 0.25 if num_ranks == 1 else 0.3 + 0.1 * task.averages_gradients
        slowest, faster = ({"steps_s": [each] * 3} for each in (seconds, seconds / 2))
        return [OUTCOME | faster] * (num_ranks - 1) + [OUTCOME | slowest]

    report, tasks, lines, _ = steps(measure, num_ranks=2, num_rounds=1, other=jax)
    names, results = ["candle_p1", "no allreduce", "one process"], report["results"]
    assert [each["variant"] for each in results] == [*names, *(f"{name}, jax" for name in names)]
    assert [task.averages_gradients for task in tasks] == [True, False, True]
    assert [result["num_ranks"] for result in results] == [2, 2, 1, 2, 2, 1]
    speedup = results[0]["speedup"]
    assert speedup["candle_p1, jax"] == pytest.approx((0.6 + EXPOSED_S) / 0.4)
    assert speedup["one process"] == pytest.approx((40 / 0.4) / (20 / 0.25))
    assert report["communication"] == pytest.approx({"exposed_s": 0.1, "share": 0.25})
    assert "jax 0.10.2, by /opt/jax/bin/python" in lines
    assert "exposed communication, jax: 300 ms" in lines
    # Models are compared within an environment only.
    report, _, lines, _ = steps(slower, num_rounds=1, other=jax)
    assert set(report["differences"]) == {"plain Keras", "plain Keras, jax"}
    assert "fast kernels are for TensorFlow on CPUs" in lines


@pytest.mark.parametrize(
    ("flags", "conditions", "message"),
    [
        ([], {"keras2": "/opt/keras2", "num_ranks": 2}, "--np"),
        ([], {"keras2": "/opt/keras2", "baseline": "none"}, "--baseline"),
        (["--engine", "jax"], {"keras2": "/opt/keras2"}, "TensorFlow"),
        (["--engine", "auto"], {"compare_env": "python"}, "--engine .* --compare_env"),
    ],
)
def test_what_cannot_be_compared_is_refused(monkeypatch, jax, flags, conditions, message):
    monkeypatch.setattr(step, "choose_backend", lambda engine: engine)
    ours = Step(benchmark="nt3", flags=["--size", "small", *flags], **conditions)
    ours.other = jax if ours.compare_env else None
    with pytest.raises(ParameterError, match=message):
        ours.prepare()


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
    with pytest.raises(ParameterError, match=f"--compare_env {python} .*{message}"):
        OtherEnvironment.of(str(python))


def test_an_error_of_another_environment_is_raised_here(monkeypatch):
    assert OtherEnvironment.of(sys.executable).backend == choose_backend()
    monkeypatch.setenv("KERAS_BACKEND", "theano")  # chosen here, and nothing to the other one
    other = f"{sys.prefix}/bin/../bin/python"
    with pytest.raises(CandleError, match="'nt4'"):
        run(StepTask(benchmark="nt4"), 1, "other", other)
    with pytest.raises(CandleError, match="theano"):
        run(BenchTask(), 1, "here")
