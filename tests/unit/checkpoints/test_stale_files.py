"""What writers that were killed leave behind."""

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
from tests.unit.checkpoints.conftest import failing, latest, named
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

    monkeypatch.setattr("candle_p1.checkpoints.stale_files.remove_tree", refuse)
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
