import sys

import numpy as np
import pytest

from candle_p1.bench import step
from candle_p1.bench.step import Step, difference
from candle_p1.bench.step_task import StepTask
from candle_p1.bench.task import BenchTask, OtherEnvironment, run
from candle_p1.distributed.backend import choose_backend
from candle_p1.errors import CandleError, ParameterError
from tests.unit.bench.test_bench_reports import STEPS

OUTCOME = STEPS | {"roofline": None}


@pytest.mark.parametrize(
    ("keras2", "change", "what"),
    [
        (None, {"losses": [0.7, 0.6, float("nan")]}, "loss"),
        (None, {"updates": {"kernel": [0.1, -0.2, 0.21], "bias": [0.0, 0.01]}}, "update"),
        ("/opt/keras2", {"losses": [0.7, 0.6, 0.501]}, "loss"),
    ],
)
def test_variants_that_train_another_model_are_not_compared(compare, keras2, change, what):
    def measure(task, num_ranks):
        is_other = task.keras2 == keras2 and task.kernels == "plain"
        return [OUTCOME | change if is_other else OUTCOME]

    with pytest.raises(CandleError, match=f"{'Keras 2' if keras2 else 'plain Keras'} .*{what}"):
        compare(Step(benchmark="nt3", num_steps=3, keras2=keras2), measure)


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


@pytest.fixture
def jax(monkeypatch):
    monkeypatch.setattr(step, "choose_backend", lambda: "tensorflow")
    return OtherEnvironment("/opt/jax/bin/python", "jax")


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
