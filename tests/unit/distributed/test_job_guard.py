"""The guard of a rank, with a launcher that is a few lines of Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from candle_p1.distributed.job_guard import STOPPED_VARIABLE, is_gone, limit_from
from candle_p1.errors import SetupError

RANK = """
import os, sys, time
from candle_p1.distributed import job_guard

def sleep():
    os.write(1, f"{os.getpid()}\\n".encode())  # at once: ranks share the pipe
    time.sleep(600)

with job_guard.begin():
    sys.argv[1] == "starting" and sleep()
sys.argv[1] == "watched" and job_guard.report_to(lambda trouble: os._exit(1))
sleep()
"""
LAUNCHER = """
import os, subprocess, sys
os.environ["PMIX_SERVER_TMPDIR"] = f"{os.environ['SESSIONS']}/ompi.{os.getpid()}"
os.makedirs(os.environ["PMIX_SERVER_TMPDIR"] + "/1")
ranks = [subprocess.Popen([sys.executable, "-c", *sys.argv[1:]]) for _ in range(3)]
codes = [rank.wait() for rank in ranks]
"""


@pytest.fixture(params=["starting", "running", "watched"])
def job(request, tmp_path):
    """A launcher and its three ranks, as processes; MPI is starting, or has started.

    In a run that is "watched", the server ends a rank as soon as that has reported anything.
    """
    command = [sys.executable, "-c", LAUNCHER, RANK, request.param]
    environment = os.environ | {STOPPED_VARIABLE: "1", "SESSIONS": str(tmp_path)}
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(3)]
    yield psutil.Process(launcher.pid), ranks
    for process in (*ranks, launcher):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.communicate()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("victim", "number"),
    [("rank", signal.SIGSTOP), ("launcher", signal.SIGSTOP), ("launcher", signal.SIGKILL)],
)
def test_trouble_ends_the_job_and_what_is_stopped(job, tmp_path, victim, number):
    launcher, ranks = job
    (ranks[1] if victim == "rank" else launcher).send_signal(number)
    # This launcher leaves the third rank alone when the one that saw the stopped one has ended.
    expected = [ranks[1]] if victim == "rank" else [launcher, *ranks]
    deadline = time.monotonic() + 30
    while not all(map(is_gone, expected)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(map(is_gone, expected))
    assert sum(map(is_gone, ranks)) == (2 if victim == "rank" else 3)
    assert any(tmp_path.iterdir()) == (victim == "rank")  # the launcher's session directory


@pytest.mark.extended
def test_a_job_that_is_suspended_as_a_whole_goes_on(job):
    launcher, ranks = job
    for process in (launcher, *ranks):
        process.suspend()
    time.sleep(4)
    for process in (*ranks, launcher):  # the launcher last, as if it were still stopped
        process.resume()
    time.sleep(3)
    assert not any(map(is_gone, ranks))


@pytest.mark.parametrize(("text", "limit_s"), [("", 10.0), ("2.5", 2.5), ("0", float("inf"))])
def test_a_limit_from_the_environment(monkeypatch, text, limit_s):
    monkeypatch.setenv(STOPPED_VARIABLE, text)
    assert limit_from(STOPPED_VARIABLE, 10.0) == limit_s


@pytest.mark.parametrize("text", ["-1", "nan", "soon"])
def test_a_wrong_limit_is_refused(monkeypatch, text):
    monkeypatch.setenv(STOPPED_VARIABLE, text)
    with pytest.raises(SetupError, match=STOPPED_VARIABLE):
        limit_from(STOPPED_VARIABLE, 10.0)
