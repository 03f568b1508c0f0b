"""A study as users start it: runs under mpirun, a kill -9 half-way, a run that fails."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest

from candle_p1.records.record import read_record as read_record_as_type
from candle_p1.records.record import write_record
from tests.conftest import CANDLE_P1, await_end, wait_until
from tests.planted_records import changed, plant
from tests.records import read_record

pytestmark = pytest.mark.extended

TINY = """
title = "NT3 in a small network"
benchmark = "nt3"
repeats = 1
minutes = 3
threads = 1
vary.loader = ["original", "parallel"]

[flags]
size = "small"
epochs = 2
train_steps = 2
val_steps = 1
test_steps = 1
conv = [4, 20, 1]
pool = 10
dense = 8

[sizes.tiny]
ranks = [2]
"""
START_S = 120


@pytest.fixture
def command(mpirun, tmp_path):
    """Returns the command line that runs a study."""

    def command(text=TINY, *argv):
        (tmp_path / "tiny.toml").write_text(text)
        return [sys.executable, "-m", "candle_p1.cli", "study", "run", "tiny.toml", *argv]

    return command


def records(tmp_path):
    paths = (tmp_path / "output/tiny-tiny").glob("*/run.json")
    return {path.parent.name: path for path in paths}


def ranks_of(tmp_path):
    """Returns the processes that work on the study's runs, their watchdog servers included."""
    place = str(tmp_path / "output/tiny-tiny")
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(argument.startswith(place) for argument in process.info["cmdline"] or [])
    ]


@pytest.mark.parallel
def test_a_study_that_was_killed_resumes_and_repeats_no_finished_run(
    command, start, execute, tmp_path
):
    process = start(command())

    def is_half_way():
        found = records(tmp_path)
        return len(found) >= 2 and any(
            path.stat().st_size and read_record(path)["status"] == "running"
            for path in found.values()
        )

    wait_until(is_half_way, START_S, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not ranks_of(tmp_path), 40)
    before = {
        name: path.stat().st_mtime_ns
        for name, path in records(tmp_path).items()
        if read_record(path)["status"] == "ok"
    }
    assert len(before) >= 1
    killed = records(tmp_path).keys() - before.keys()
    assert len(killed) == 1

    code, output = execute(command())
    print(output)
    assert code == 0
    assert f"{len(before)} of 2 runs are already done" in output
    assert "2 of 2 runs are done" in output
    found = records(tmp_path)
    assert {name: found[name].stat().st_mtime_ns for name in before} == before
    assert found.keys() == {f"loader-{loader}-np2-r0" for loader in ("original", "parallel")} | {
        f"{name}-attempt2" for name in killed
    }
    record = read_record(found[max(name for name in found if "parallel-np2" in name)])
    assert (record["num_ranks"], record["data"]["loader"]) == (2, "parallel")
    assert {rank["threads"] for rank in record["ranks"]} == {1}

    code, output = execute(command())
    assert code == 0
    assert "2 of 2 runs are already done" in output
    assert len(records(tmp_path)) == 2 + len(killed)


@pytest.mark.parallel
def test_a_failing_run_is_skipped_and_the_study_ends_with_code_1(command, execute, tmp_path):
    text = TINY.replace("threads = 1", "threads = 1\ntimeline = true")
    text = text.replace('["original", "parallel"]', '["parallel"]')
    text += '[[variants]]\nname = "good"\n[[variants]]\nname = "bad"\npower = "replay:absent.csv"\n'
    code, output = execute(command(text))
    print(output)
    assert code == 1
    assert "failed: bad-loader-parallel-np2-r0" in output
    assert "1 of 2 runs are done" in output
    found = records(tmp_path)
    good = read_record(found["good-loader-parallel-np2-r0"])
    assert (good["status"], good["training"]["traced"]) == ("ok", True)
    timeline = found["good-loader-parallel-np2-r0"].with_name("timeline.json")
    assert good["timeline"]["file"] == str(timeline)
    assert "NEGOTIATE_BROADCAST" in timeline.read_text()
    failed = read_record(found["bad-loader-parallel-np2-r0"])
    assert failed["status"] == "failed"
    assert "absent.csv" in failed["failure"]["reason"]


@pytest.mark.parallel
def test_a_signal_ends_the_ranks_and_the_study(command, start, tmp_path):
    text = TINY.replace("epochs = 2", 'epochs = 20000\nepochs_scaling = "weak"')
    process = start(command(text, "--ranks", "2"))
    wait_until(
        lambda: any((path.parent / "history.csv").exists() for path in records(tmp_path).values()),
        START_S,
        process,
    )
    process.send_signal(signal.SIGINT)
    code, output = await_end(process, 60)
    print(output)
    assert code == 128 + signal.SIGINT
    assert "interrupted: 0 of 2 runs are done" in output
    assert not ranks_of(tmp_path)
    assert [read_record(path)["status"] for path in records(tmp_path).values()] == ["interrupted"]


@pytest.mark.parallel
@pytest.mark.jax_engine
def test_a_study_with_the_engine_jax_is_reported_and_compared_with_horovod(
    command, execute, tmp_path
):
    text = TINY.replace('["original", "parallel"]', '["parallel"]')
    code, output = execute(command(text.replace("[flags]", '[flags]\nengine = "jax"')))
    print(output)
    assert code == 0
    assert "1 of 1 runs are done" in output
    (path,) = records(tmp_path).values()
    record = read_record(path)
    assert record["distributed"]["backend"] == "jax"

    other = tmp_path / "horovod"
    other.mkdir()
    plant(other, "nt3", 2, engine="horovod")
    code, output = execute([*CANDLE_P1, "compare", other, path])
    print(output)
    assert code == 0
    assert "engine (what averaged the gradients) differs" in " ".join(output.split())

    # The same machine and settings, so that both runs could be in one point.
    facts = read_record_as_type(path)
    changes = {"distributed.backend": "horovod", "started": "2026-01-01T00:00:00+00:00"}
    twin = tmp_path / "output/tiny-tiny/twin"
    twin.mkdir()
    write_record(twin / "run.json", changed(facts, changes))
    code, output = execute([*CANDLE_P1, "report", "output/tiny-tiny", "-o", "report"])
    print(output)
    assert code == 0
    page = (tmp_path / "report/index.html").read_text()
    for words in ("different engines (horovod and jax)", "engine horovod", "engine jax"):
        assert words in page
