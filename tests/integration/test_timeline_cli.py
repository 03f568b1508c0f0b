"""The timeline of a real run of two ranks, through the command line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from candle_p1.cli.timeline import command
from candle_p1.errors import CandleError, ParameterError
from candle_p1.instrument.clock import ClockAnchor
from candle_p1.reports.timeline.events import EventReader

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

NUM_STEPS = 6
SCRIPT = f"""
import json, os, time
from dataclasses import asdict

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import tensorflow as tf
import horovod.tensorflow as hvd
from candle_p1.instrument.clock import read_anchor

anchor = read_anchor()
before_s = time.perf_counter()
hvd.init()
after_s = time.perf_counter()
weight, *gradients = [tf.Variable(tf.random.uniform([5000])) for _ in range(3)]
spans = {{}}

@tf.function
def reduced():
    return [hvd.allreduce(2 * g, name=f"gradient.{{i}}.w") for i, g in enumerate(gradients)]

def timed(name, call):
    begin_s = time.perf_counter()
    call()
    spans[name] = begin_s, time.perf_counter()
    time.sleep(0.05)

timed("weight", lambda: hvd.broadcast(weight, root_rank=0, name="weight").numpy())
for step in range({NUM_STEPS}):
    timed(str(step), lambda: [mean.numpy() for mean in reduced()])
if hvd.rank() == 0:
    facts = asdict(anchor), before_s, after_s, spans
    open("facts.json", "w").write(json.dumps(facts))
hvd.shutdown()
"""


@pytest.fixture
def traced(execute, environment, mpirun, tmp_path):
    """Runs the script; returns the timeline's path and what rank 0 measured."""
    script, path = tmp_path / "script.py", tmp_path / "timeline.json"
    script.write_text(SCRIPT)
    code, output = execute(
        mpirun(2, script), env=environment | {"HOROVOD_TIMELINE": str(path), "OMP_NUM_THREADS": "1"}
    )
    assert code == 0, output
    return path, json.loads((tmp_path / "facts.json").read_text())


def invoke(*words):
    return CliRunner().invoke(command, [str(word) for word in words])


def test_a_real_timeline(traced, tmp_path):
    path, (anchor, before_s, after_s, spans) = traced

    result = invoke("summary", path, "--json", tmp_path / "summary.json")
    assert result.exit_code == 0, result.output
    assert f"{NUM_STEPS} steps" in result.output
    assert "broadcast overhead" in result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"]["num_tensors"] == [2] * NUM_STEPS
    assert summary["steps"]["bytes"] == [2 * 20000] * NUM_STEPS
    assert summary["ranks"].keys() == {"0", "1"}

    # An operation begins when all ranks have asked for it, so within the time rank 0 waited for it.
    slack_s = 2e-3
    origin_s = ClockAnchor(**anchor).to_perf_counter_s(summary["origin_epoch_us"])
    assert before_s - slack_s <= origin_s <= after_s + slack_s
    begins_s = [
        origin_s + event["ts"] / 1e6
        for event in EventReader(path)
        if event.get("name") in ("BROADCAST", "ALLREDUCE")
    ]
    waited = [spans["weight"], *(spans[str(i // 2)] for i in range(2 * NUM_STEPS))]
    for begin_s, (from_s, to_s) in zip(begins_s, waited, strict=True):
        assert from_s - slack_s <= begin_s <= to_s + slack_s


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(
        '[{"ph": "B", "name": "ALLREDUCE", "ts": 5, "pid": 1},{"ph": "E", "ts": 9, "pid": 1'
    )
    return path


def test_a_truncated_timeline(small):
    result = invoke("summary", small)
    assert result.exit_code == 0
    assert "1 event, 0.000 to 0.000 s" in result.output
    assert "ALLREDUCE of tensor 1" in result.output


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("summary", "absent.json"), CandleError, "absent.json"),
        (("summary", "{}", "--gradients", "("), ParameterError, "--gradients"),
        (("summary", "{}", "--json", "absent/s.json"), ParameterError, "absent/s.json"),
        (("summary", "{}", "--record", "absent/run.json"), CandleError, "absent/run.json"),
    ],
)
def test_what_a_user_can_fix(small, words, error, message):
    result = invoke(*(str(word).format(small) for word in words))
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
