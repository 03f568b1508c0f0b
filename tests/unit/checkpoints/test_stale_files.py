"""What writers that were killed leave behind."""

from __future__ import annotations

import errno
import os
import signal
import sys

import pytest

from candle_p1.checkpoints.lock import take_lock
from candle_p1.checkpoints.root import CheckpointRoot
from candle_p1.checkpoints.stale_files import clean, lock_name, temporary_name
from candle_p1.records.types import Position
from tests.conftest import ROOT, wait_until
from tests.unit.checkpoints.conftest import latest
from tests.unit.checkpoints.test_lock import local_locks

TOKEN = "0123456789ab"
WRITE_FOREVER = """
import sys, time
from pathlib import Path
import numpy as np
from candle_p1.checkpoints import shard_file
from candle_p1.records.types import Position
from tools.simulated import ArrayInMemory
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import SerialCommunicator

writer = CheckpointWriter(SerialCommunicator(), Path(sys.argv[1]))
arrays = {"weights": ArrayInMemory(np.ones(100_000))}
writer.save(Position(1, 0), arrays, {}, {}, wait=True)
shard_file.os.fsync = lambda file: time.sleep(600)
writer.save(Position(2, 0), arrays, {}, {})
time.sleep(600)
"""


def hidden(root):
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def locked(root, token):
    root.mkdir(exist_ok=True)
    lock = take_lock(root / lock_name(token))
    lock.sign()
    return lock


@pytest.fixture
def token_of_dead(root):
    locked(root, TOKEN).release()  # as when its process ends
    return TOKEN


@pytest.fixture
def living(root):
    lock = locked(root, TOKEN)
    yield lock
    lock.release()


def unfinished(root, token):
    directory = root / temporary_name("epoch-0004-step-000000", token, 1)
    directory.mkdir()
    (directory / "arrays-0000.safetensors").write_bytes(b"half")
    return directory


def test_what_a_living_writer_has_is_left_alone(stored, root, living):
    directory = unfinished(root, TOKEN)
    clean(root, pytest.fail)
    assert stored.newest_good(pytest.fail).position == Position(3, 0)
    assert directory.exists()
    assert living.path.exists()


def test_what_may_belong_to_a_living_writer_of_another_node_is_left_alone(
    root, token_of_dead, monkeypatch
):
    directory = unfinished(root, token_of_dead)
    (root / lock_name(token_of_dead)).write_text("another-node\n")
    with monkeypatch.context() as patch:
        local_locks(patch, root)
        clean(root, pytest.fail)
        clean(root, pytest.fail)  # nor does having looked make it ours
    assert directory.exists()
    clean(root, pytest.fail)
    assert hidden(root) == []


def test_what_a_file_system_cannot_tell_of_is_left_alone(root, token_of_dead, monkeypatch):
    def refuse(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    directory = unfinished(root, token_of_dead)
    (root / lock_name(token_of_dead)).write_text("another-node\n")
    with monkeypatch.context() as patch:
        patch.setattr("candle_p1.checkpoints.lock._is_local", refuse)
        clean(root, pytest.fail)
    assert directory.exists()
    clean(root, pytest.fail)  # the lock has been released
    assert hidden(root) == []


@pytest.mark.parametrize(
    ("latest", "pending", "age", "found"),
    [
        (2, 3, "new", 3),  # complete, but not yet linked
        (1, 3, "old", 1),  # a user has changed the link since
        (3, 4, "new", 3),  # never complete
    ],
)
def test_what_was_complete_but_not_yet_linked_is_linked(
    stored, root, token_of_dead, latest, pending, age, found
):
    (root / "latest").unlink()
    (root / "latest").symlink_to(f"epoch-{latest:04}-step-000000")
    for name in ("latest", "best"):
        link = root / temporary_name(name, token_of_dead, 1)
        link.symlink_to(f"epoch-{pending:04}-step-000000")
        if age == "old":
            os.utime(link, (1, 1), follow_symlinks=False)
    assert stored.newest_good(pytest.fail).position == Position(found, 0)
    assert (root / "best").exists() is (pending == 3)
    assert hidden(root) == []


def test_what_cannot_be_removed_is_named(root, said, token_of_dead, monkeypatch):
    directory = unfinished(root, token_of_dead)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("candle_p1.checkpoints.stale_files.remove_tree", refuse)
    clean(root, said.append)
    assert len(said) == 1
    assert str(directory) in said[0]


def test_killed_while_it_writes(start, root, make_writer, save, said):
    """Neither is what was being written taken for a checkpoint, nor does it stay."""
    process = start([sys.executable, "-c", WRITE_FOREVER, root], cwd=ROOT)
    second = "epoch-0002-step-000000"
    wait_until(lambda: list(root.glob(f".{second}*/arrays*")), 60, process)
    stored = CheckpointRoot(root)
    assert stored.newest_good(pytest.fail).position == Position(1, 0)
    assert list(root.glob(f".{second}*")), "its writer is alive"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert stored.newest_good(pytest.fail).position == Position(1, 0)
    assert hidden(root) == []
    writer = make_writer(after=latest(root))
    assert save(writer, 2)
    writer.close()
    assert hidden(root) == [], "nor does a writer leave anything that ends"
    assert stored.names() == ["epoch-0001-step-000000", second]
