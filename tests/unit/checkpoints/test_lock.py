"""Whether the process that held a lock has ended, and what killed writers leave behind."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from candle_p1.checkpoints.checkpoint import CheckpointRoot
from candle_p1.checkpoints.lock import WITHOUT_LOCKS, clean, lock_name, take_lock, temporary_name
from candle_p1.records.types import Position
from tests.conftest import ROOT, wait_until
from tests.unit.checkpoints.conftest import failing, latest, named

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
    monkeypatch.setattr(Path, "read_text", lambda path, **options: mounts)


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


TOKEN = "0123456789ab"
WRITE_FOREVER = """
import sys, time
from pathlib import Path
import numpy as np
from candle_p1.checkpoints import shards
from candle_p1.records.types import Position
from tools.simulated import ArrayInMemory
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import SerialCommunicator

writer = CheckpointWriter(SerialCommunicator(), Path(sys.argv[1]))
arrays = {"weights": ArrayInMemory(np.ones(100_000))}
writer.save(Position(1, 0), arrays, {}, {}, wait=True)
shards.os.fsync = lambda file: time.sleep(600)
writer.save(Position(2, 0), arrays, {}, {})
time.sleep(600)
"""


def hidden(root):
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


@pytest.fixture
def lock_of_dead(root):
    """The file of the lock of a writer that has ended."""
    root.mkdir(exist_ok=True)
    lock = take_lock(root / lock_name(TOKEN))
    lock.sign()
    lock.release()
    return lock.path


@pytest.fixture
def unfinished(root, lock_of_dead):
    directory = root / temporary_name(named(4), TOKEN, 1)
    directory.mkdir()
    (directory / "arrays-0000.safetensors").write_bytes(b"half")
    return directory


@pytest.mark.parametrize("knows_locks", [True, False])
def test_what_may_belong_to_a_living_writer_of_another_node_is_left_alone(
    root, lock_of_dead, unfinished, monkeypatch, knows_locks
):
    lock_of_dead.write_text("another-node\n")
    with monkeypatch.context() as patch:
        if knows_locks:
            local_locks(patch, root)
        else:
            patch.setattr("candle_p1.checkpoints.lock._is_local", failing(errno.ESTALE))
        for _ in range(2):  # having looked once does not make it ours
            clean(root, pytest.fail)
    assert unfinished.exists()
    clean(root, pytest.fail)
    assert hidden(root) == []


@pytest.mark.parametrize(
    ("linked", "pending", "is_old", "found"),
    [
        (2, 3, False, 3),  # complete, but not yet linked
        (1, 3, True, 1),  # a user has changed the link since
        (3, 4, False, 3),  # never complete
    ],
)
def test_what_was_complete_but_not_yet_linked_is_linked(
    stored, root, lock_of_dead, linked, pending, is_old, found
):
    (root / "latest").unlink()
    (root / "latest").symlink_to(named(linked))
    for name in ("latest", "best"):
        link = root / temporary_name(name, TOKEN, 1)
        link.symlink_to(named(pending))
        if is_old:
            os.utime(link, (1, 1), follow_symlinks=False)
    assert stored.newest_good(pytest.fail).position == Position(found, 0)
    assert (root / "best").exists() is (pending == 3)
    assert hidden(root) == []


def test_what_cannot_be_removed_is_named(root, said, unfinished, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("candle_p1.checkpoints.lock.remove_tree", refuse)
    clean(root, said.append)
    (sentence,) = said
    assert str(unfinished) in sentence


def test_killed_while_it_writes(start, root, make_writer, save):
    """Neither is what was being written taken for a checkpoint, nor does it stay."""
    process = start([sys.executable, "-c", WRITE_FOREVER, root], cwd=ROOT)
    wait_until(lambda: list(root.glob(f".{named(2)}*/arrays*")), 60, process)
    stored = CheckpointRoot(root)
    assert stored.newest_good(pytest.fail).position == Position(1, 0)
    assert len(hidden(root)) == 2, "its writer is alive"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert stored.newest_good(pytest.fail).position == Position(1, 0)
    assert hidden(root) == []
    writer = make_writer(after=latest(root))
    assert save(writer, 2)
    writer.close()
    assert hidden(root) == [], "nor does a writer leave anything that ends"
    assert stored.names() == [named(1), named(2)]
