"""The guard of a rank, with a launcher that is a few lines of Python."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import psutil
import pytest

from candle_p1.distributed.job_guard import (
    ABORT_DELAY,
    STOPPED_VARIABLE,
    is_gone,
    limit_from,
)
from tests.conftest import wait_until

RANK = """
import mmap, os, sys, time
from candle_p1.distributed import job_guard

segment = os.path.join(os.environ["SEGMENTS"], f"sm_segment.host.0.1234.{os.getpid()}")
with open(segment, "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)  # as MPI does

def sleep():
    os.write(1, f"{os.getpid()}\\n".encode())  # at once: ranks share the pipe
    time.sleep(600)

with job_guard.begin():
    sys.argv[1] == "starting" and sleep()
sys.argv[1] == "watched" and job_guard.report_to(lambda trouble: os._exit(1))
if sys.argv[1] == "ending":
    os.write(1, f"{os.getpid()}\\n".encode())
    launcher = os.getppid()
    while os.getppid() == launcher:
        time.sleep(0.001)
    sys.exit()  # before the guard looks again
sleep()
"""
LAUNCHER = """
import os, subprocess, sys
os.environ["PMIX_SERVER_TMPDIR"] = f"{os.environ['SESSIONS']}/ompi.{os.getpid()}"
os.makedirs(os.environ["PMIX_SERVER_TMPDIR"] + "/1")
ranks = [subprocess.Popen([sys.executable, "-c", *sys.argv[1:]]) for _ in range(3)]
codes = [rank.wait() for rank in ranks]
"""


MODES = ("starting", "running", "watched")
"""MPI is starting, or has started; in a run that is "watched", the server ends a rank as soon as
that has reported anything."""


def launch(mode, tmp_path, environment):
    segments = tmp_path / f"{mode}-segments"
    segments.mkdir()
    places = {"SESSIONS": str(tmp_path / mode), "SEGMENTS": str(segments)}
    command = [sys.executable, "-c", LAUNCHER, RANK, mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment | places)


@pytest.fixture
def jobs(tmp_path):
    """A launcher and its three ranks, as processes, for each of MODES.

    The jobs run at the same time, because each takes seconds in which it only waits.
    """
    environment = os.environ | {STOPPED_VARIABLE: "1"}
    with ExitStack() as stack:
        launchers = {}
        for mode in MODES:
            launchers[mode] = launch(mode, tmp_path, environment)
            stack.callback(launchers[mode].communicate)
            stack.callback(launchers[mode].kill)
        jobs = {}
        for mode, launcher in launchers.items():
            jobs[mode] = psutil.Process(launcher.pid), []
            for _ in range(3):
                jobs[mode][1].append(psutil.Process(int(launcher.stdout.readline())))
                stack.callback(kill, jobs[mode][1][-1])
        yield jobs


def kill(process):
    with suppress(psutil.NoSuchProcess):
        process.kill()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("victim", "number"),
    [("rank", signal.SIGSTOP), ("launcher", signal.SIGSTOP), ("launcher", signal.SIGKILL)],
)
def test_trouble_ends_the_job_and_what_is_stopped(jobs, tmp_path, victim, number):
    for launcher, ranks in jobs.values():
        (ranks[1] if victim == "rank" else launcher).send_signal(number)
    # This launcher leaves the third rank alone when the one that saw the stopped one has ended.
    expected = {
        mode: [ranks[1]] if victim == "rank" else [launcher, *ranks]
        for mode, (launcher, ranks) in jobs.items()
    }
    wait_until(lambda: all(map(is_gone, itertools.chain(*expected.values()))), 30)
    for mode, (_, ranks) in jobs.items():
        assert sum(map(is_gone, ranks)) == (2 if victim == "rank" else 3), mode
        sessions = list((tmp_path / mode).iterdir())  # the launcher's directory
        assert len(sessions) == (victim == "rank"), mode
        if victim == "launcher":
            assert not list((tmp_path / f"{mode}-segments").iterdir()), mode


def test_a_rank_that_ends_after_its_launcher_was_killed_removes_its_shared_memory(tmp_path):
    """It ends before the guard looks for the first time."""
    with launch("ending", tmp_path, os.environ) as launcher:
        ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(3)]
        segments = tmp_path / "ending-segments"
        assert len(list(segments.iterdir())) == 3
        launcher.kill()
        wait_until(lambda: all(map(is_gone, ranks)), 30)
    assert not list(segments.iterdir())
    assert not list((tmp_path / "ending").iterdir())


@pytest.mark.extended
def test_a_job_that_is_suspended_as_a_whole_goes_on(jobs):
    for launcher, ranks in jobs.values():
        for process in (launcher, *ranks):
            process.suspend()
    time.sleep(4)
    for launcher, ranks in jobs.values():
        for process in (*ranks, launcher):  # the launcher last, as if it were still stopped
            process.resume()
    time.sleep(3)
    for mode, (_, ranks) in jobs.items():
        assert not any(map(is_gone, ranks)), mode


@pytest.mark.parametrize(("chosen", "delay"), [({}, "3"), ({ABORT_DELAY: "9"}, "9")])
def test_mpi_waits_before_it_ends_a_rank_unless_the_user_wants_another_delay(chosen, delay):
    script = "import os; from candle_p1.distributed import job_guard\n"
    script += f"with job_guard.begin(): print(os.environ[{ABORT_DELAY!r}])"
    environment = {name: text for name, text in os.environ.items() if name != ABORT_DELAY}
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, env=environment | chosen, text=True) == f"{delay}\n"


@pytest.mark.parametrize(("text", "limit_s"), [("", 10.0), ("2.5", 2.5), ("0", float("inf"))])
def test_a_limit_from_the_environment(monkeypatch, text, limit_s):
    monkeypatch.setenv(STOPPED_VARIABLE, text)
    assert limit_from(STOPPED_VARIABLE, 10.0) == limit_s
