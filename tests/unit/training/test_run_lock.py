"""The lock that tells whether a run is alive."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from candle_p1.training import run_lock
from candle_p1.training.run_lock import LOCK_NAME, take_lock

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from candle_p1.training.run_lock import take_lock
lock = take_lock(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "60"], pass_fds=[lock.descriptor])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_only_one_process_has_the_lock_until_it_and_its_heir_have_ended(tmp_path):
    """The heir stands for the watchdog server, which may outlive rank 0."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        heir = int(holder.stdout.readline())
        assert take_lock(tmp_path) is None
        holder.kill()
        holder.wait()
        assert take_lock(tmp_path, wait_s=0.5) is None
        subprocess.run(["kill", "-9", str(heir)], check=True)
        lock = take_lock(tmp_path, wait_s=10)
    assert lock.proves_end  # the run that held it has ended
    lock.release()
    assert (tmp_path / LOCK_NAME).exists()


def test_a_directory_whose_lock_nobody_has_held_proves_nothing(tmp_path):
    lock = take_lock(tmp_path)
    assert not lock.proves_end
    lock.release()
    assert take_lock(tmp_path).proves_end


@pytest.mark.parametrize("number", run_lock.WITHOUT_LOCKS)
def test_a_file_system_without_locks_is_told_apart_from_a_lock_that_is_held(
    tmp_path, monkeypatch, number
):
    def refuse(descriptor, operation):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = take_lock(tmp_path)
    assert lock.descriptor is None
    assert not lock.proves_end
    lock.release()


def test_other_errors_are_raised(tmp_path, monkeypatch):
    def fail(descriptor, operation):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="broken"):
        take_lock(tmp_path)


def test_a_lock_of_another_node_proves_nothing_where_locks_are_local(tmp_path, monkeypatch):
    (tmp_path / LOCK_NAME).write_text("another-node\n")
    lock = take_lock(tmp_path)
    assert lock.proves_end
    device = tmp_path.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    mounts = f"36 25 {numbers} / / rw shared:1 - lustre mds:/fs rw,localflock\n"
    monkeypatch.setattr(Path, "read_text", lambda path: mounts)
    assert not lock.proves_end
    lock.release()
