"""A study as users start it: runs under mpirun, a kill -9 half-way, a signal."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.conftest import CANDLE_P1, await_end, wait_until
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

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

    def command(text):
        (tmp_path / "tiny.toml").write_text(text)
        return [*CANDLE_P1, "study", "run", "tiny.toml"]

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


def test_a_study_that_was_killed_resumes_and_repeats_no_finished_run(
    command, start, execute, tmp_path
):
    traced = command(TINY.replace("threads = 1", "threads = 1\ntimeline = true"))
    process = start(traced)

    def is_half_way():
        found = records(tmp_path).values()
        statuses = [read_record(path)["status"] for path in found if path.stat().st_size]
        return len(found) == 2 and "running" in statuses

    wait_until(is_half_way, START_S, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not ranks_of(tmp_path), 40)
    before = records(tmp_path)
    done = [name for name in before if read_record(before[name])["status"] == "ok"]
    (killed,) = before.keys() - done
    written = [before[name].stat().st_mtime_ns for name in done]

    code, output = execute(traced)
    assert code == 0, output
    assert "1 of 2 runs are already done" in output
    assert "2 of 2 runs are done" in output
    found = records(tmp_path)
    assert [found[name].stat().st_mtime_ns for name in done] == written
    assert found.keys() == {*before, f"{killed}-attempt2"}
    for name in (*done, f"{killed}-attempt2"):
        record, timeline = read_record(found[name]), found[name].with_name("timeline.json")
        assert (record["status"], record["num_ranks"]) == ("ok", 2)
        assert {rank["threads"] for rank in record["ranks"]} == {1}
        assert (record["data"]["loader"] == "parallel") == ("parallel" in name)
        assert (record["training"]["traced"], record["timeline"]["file"]) == (True, str(timeline))
        assert "NEGOTIATE_BROADCAST" in timeline.read_text()


def test_a_signal_ends_the_ranks_and_the_study(command, start, tmp_path):
    text = TINY.replace("epochs = 2", 'epochs = 20000\nepochs_scaling = "weak"')
    process = start(command(text))
    pattern = "output/tiny-tiny/*/history.csv"
    wait_until(lambda: any(tmp_path.glob(pattern)), START_S, process)
    process.send_signal(signal.SIGINT)
    code, output = await_end(process, 60)
    assert code == 128 + signal.SIGINT, output
    assert "interrupted: 0 of 2 runs are done" in output
    assert not ranks_of(tmp_path)
    assert [read_record(path)["status"] for path in records(tmp_path).values()] == ["interrupted"]
