"""The timeline of a real run of two ranks, through the command line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from candle_p1.cli.timeline import command
from candle_p1.reports.timeline.events import EventReader

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

NUM_STEPS = 6
SCRIPT = f"""
import json, os, time

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
    facts = anchor._asdict(), before_s, after_s, spans
    open("facts.json", "w").write(json.dumps(facts))
hvd.shutdown()
"""


def invoke(*words):
    return CliRunner().invoke(command, [str(word) for word in words])


def test_a_real_timeline(execute, environment, mpirun, tmp_path):
    script, path = tmp_path / "script.py", tmp_path / "timeline.json"
    script.write_text(SCRIPT)
    traced = {"HOROVOD_TIMELINE": str(path), "OMP_NUM_THREADS": "1"}
    code, output = execute(mpirun(2, script), env=environment | traced)
    assert code == 0, output
    facts = json.loads((tmp_path / "facts.json").read_text())
    anchor, before_s, after_s, spans = facts  # what rank 0 measured
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
    elapsed_us = summary["origin_epoch_us"] - anchor["epoch_us"]
    origin_s = anchor["perf_counter_s"] + elapsed_us / 1e6
    assert before_s - slack_s <= origin_s <= after_s + slack_s
    begins_s = [
        origin_s + event["ts"] / 1e6
        for event in EventReader(path)
        if event.get("name") in ("BROADCAST", "ALLREDUCE")
    ]
    waited = [spans["weight"], *(spans[str(i // 2)] for i in range(2 * NUM_STEPS))]
    for begin_s, (from_s, to_s) in zip(begins_s, waited, strict=True):
        assert from_s - slack_s <= begin_s <= to_s + slack_s
