"""Whether the process that held a lock has ended."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from candle_p1.checkpoints.lock import WITHOUT_LOCKS, take_lock
from tests.unit.checkpoints.conftest import failing

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from candle_p1.checkpoints.lock import take_lock
lock = take_lock(Path(sys.argv[1]))
lock.sign()
child = subprocess.Popen(["sleep", "60"], pass_fds=[lock.descriptor])
print(child.pid, flush=True)
time.sleep(60)
"""


def local_locks(monkeypatch, directory):
    """Has the file system of a directory show locks on this node only."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = f"36 25 {number} / / rw shared:1 - lustre mds:/fs rw,localflock\n"
    monkeypatch.setattr(Path, "read_text", lambda path: mounts)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "lock"


def test_only_one_process_has_the_lock_until_it_and_its_heir_have_ended(file):
    """The heir stands for the watchdog server, which may outlive rank 0."""
    command = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        heir = int(holder.stdout.readline())
        assert take_lock(file) is None
        holder.kill()
        holder.wait()
        assert take_lock(file, wait_s=0.5) is None
        subprocess.run(["kill", "-9", str(heir)], check=True)
        lock = take_lock(file, wait_s=10)
    assert lock.proves_end  # the process that held it has ended
    lock.release()
    assert file.exists()


def test_a_lock_that_nobody_has_signed_proves_nothing(file):
    take_lock(file).release()
    lock = take_lock(file)
    assert not lock.proves_end
    lock.sign()
    lock.release()
    assert take_lock(file).proves_end


@pytest.mark.parametrize("number", WITHOUT_LOCKS)
def test_a_file_system_without_locks_is_told_apart_from_one_that_fails(file, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    lock = take_lock(file)
    assert not lock.proves_end
    lock.sign()
    lock.release()
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        take_lock(file)


def test_a_lock_of_another_node_proves_nothing_where_locks_are_local(file, monkeypatch):
    file.write_text("another-node\n")
    for _ in range(2):  # having looked once does not make it ours
        lock = take_lock(file)
        assert lock.proves_end
        with monkeypatch.context() as patch:
            local_locks(patch, file.parent)
            assert not lock.proves_end
        lock.release()
    lock = take_lock(file)
    lock.sign()
    assert file.read_text().split() == [os.uname().nodename]


def test_a_file_that_another_process_removes_meanwhile_is_not_taken_for_the_lock(file, monkeypatch):
    """Who cleans up may hold the lock when its writer begins, and then remove the file."""

    def remove_first(descriptor, operation):
        monkeypatch.undo()
        file.unlink()
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    assert take_lock(file) is None
    lock = take_lock(file)
    assert os.path.samestat(file.stat(), os.fstat(lock.descriptor))


def test_a_lock_that_is_held_for_a_moment_is_waited_for(file):
    threading.Timer(0.1, take_lock(file).release).start()
    assert take_lock(file, wait_s=10)


def test_a_lock_that_cannot_be_signed_is_released(file, monkeypatch):
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        take_lock(file).sign()
    assert not take_lock(file).proves_end
