from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from candle_p1.cluster.process import guarded, run_to_end
from tests.conftest import wait_until


def sleeper(tmp_path, ignore=False):
    """Returns a command that starts another process, writes the ids of both, and sleeps."""
    handler = "SIG_IGN" if ignore else "SIG_DFL"
    ignoring = f"import signal; signal.signal(signal.SIGTERM, signal.{handler})"
    child = f"{ignoring}; import time; time.sleep(600)"
    program = (
        f"{ignoring}; import os, pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "time.sleep(0.3)\n"
        f"part = pathlib.Path({str(tmp_path / 'part')!r})\n"
        "part.write_text(f'{os.getpid()} {child.pid}')\n"
        "part.rename(part.with_name('pids'))\n"
        "time.sleep(600)\n"
    )
    return [sys.executable, "-c", program]


def pids_in(tmp_path):
    wait_until((tmp_path / "pids").exists, 60)
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def await_end_of(*pids):
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 10)


@pytest.mark.extended
@pytest.mark.parametrize("ignore", [False, True])
def test_a_command_at_its_limit_is_ended_with_its_children(tmp_path, ignore):
    with (tmp_path / "log").open("wb") as output:
        code, is_late = run_to_end(sleeper(tmp_path, ignore), os.environ, output, 3.0, grace_s=1.0)
    assert is_late
    assert code == (-signal.SIGKILL if ignore else -signal.SIGTERM)
    await_end_of(*pids_in(tmp_path))


@pytest.mark.parametrize("ignore", [False, True])
def test_what_a_command_leaves_behind_is_ended(tmp_path, ignore):
    # As a launcher that was killed: its ranks, in groups of their own, have lost their parent.
    handler = "SIG_IGN" if ignore else "SIG_DFL"
    child = f"import signal, time; signal.signal(15, signal.{handler}); time.sleep(600)"
    program = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], preexec_fn=os.setpgrp)\n"
        "print(child.pid, flush=True)\n"
    )
    with (tmp_path / "log").open("wb") as output:
        command = [sys.executable, "-c", program]
        assert run_to_end(command, os.environ, output, grace_s=0.5) == (0, False)
    await_end_of(int((tmp_path / "log").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_kill_9_of_the_parent_ends_the_command(tmp_path):
    program = (
        "import os, sys\n"
        "from candle_p1.cluster.process import guarded, run_to_end\n"
        f"run_to_end({sleeper(tmp_path)!r}, os.environ, sys.stdout.buffer)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    try:
        command, child = pids_in(tmp_path)
    finally:
        parent.kill()
        parent.wait()
    try:
        await_end_of(command)
    finally:
        psutil.Process(child).kill()  # a launcher would have ended it


def test_the_command_does_not_start_if_its_parent_has_died(tmp_path):
    guard = guarded(["touch", str(tmp_path / "touched")], 1)
    code = subprocess.run(guard, check=False).returncode
    assert code == (128 + signal.SIGTERM if sys.platform == "linux" else 0)
    assert (tmp_path / "touched").exists() == (code == 0)
