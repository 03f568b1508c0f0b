"""What writers that were killed leave behind."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from candle_p1.checkpoints.leftovers import WriterClaim, settle, temporary_name
from candle_p1.checkpoints.manifest import Position
from candle_p1.checkpoints.root import CheckpointRoot
from tests.conftest import wait_until

WRITE_FOREVER = """
import sys, time
from pathlib import Path
import numpy as np
from candle_p1.checkpoints import part_file
from candle_p1.checkpoints.manifest import Position
from candle_p1.checkpoints.source import ArrayInMemory
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import SerialCommunicator

writer = CheckpointWriter(SerialCommunicator(), Path(sys.argv[1]))
arrays = {"weights": ArrayInMemory(np.ones(100_000))}
writer.save(Position(1, 0), arrays, {}, {}, wait=True)
part_file.os.fsync = lambda file: time.sleep(600)
writer.save(Position(2, 0), arrays, {}, {})
time.sleep(600)
"""


def hidden(root):
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


@pytest.fixture
def token_of_dead(root):
    claim = WriterClaim()
    claim.acquire(root)
    os.close(claim._file)  # as when its process ends
    return claim.token


@pytest.fixture
def living(root):
    claim = WriterClaim()
    claim.acquire(root)
    yield claim
    claim.release(root)


def unfinished(root, token):
    directory = root / temporary_name("epoch-0004-step-000000", token, 1)
    directory.mkdir()
    (directory / "arrays-0000.safetensors").write_bytes(b"half")
    return directory


def test_what_a_dead_writer_left_is_removed(stored, root, token_of_dead):
    unfinished(root, token_of_dead)
    settle(root, pytest.fail)
    assert hidden(root) == []
    assert len(stored.names()) == 3


def test_what_a_living_writer_has_is_left_alone(stored, root, living):
    directory = unfinished(root, living.token)
    settle(root, pytest.fail)
    assert stored.newest_good(pytest.fail).position == Position(3, 0)
    assert directory.exists()
    assert living.path(root).exists()


def test_a_writer_leaves_nothing(make_writer, save, root):
    writer = make_writer()
    assert save(writer)
    writer.close()
    assert hidden(root) == []


def pending(root, token, name, target):
    link = root / temporary_name(name, token, 1)
    link.symlink_to(target)
    return link


def test_what_was_complete_but_not_yet_linked_is_linked(stored, root, token_of_dead):
    (root / "latest").unlink()
    (root / "latest").symlink_to("epoch-0002-step-000000")
    pending(root, token_of_dead, "latest", "epoch-0003-step-000000")
    pending(root, token_of_dead, "best", "epoch-0003-step-000000")
    assert stored.newest_good(pytest.fail).position == Position(3, 0)
    assert stored.linked("best") == "epoch-0003-step-000000"
    assert hidden(root) == []


def test_a_link_that_a_user_has_changed_since_stays(stored, root, token_of_dead):
    link = pending(root, token_of_dead, "latest", "epoch-0003-step-000000")
    os.utime(link, (1, 1), follow_symlinks=False)
    (root / "latest").unlink()
    (root / "latest").symlink_to("epoch-0001-step-000000")
    assert stored.newest_good(pytest.fail).position == Position(1, 0)
    assert hidden(root) == []


def test_a_link_to_what_never_became_complete_is_removed(stored, root, token_of_dead):
    pending(root, token_of_dead, "latest", "epoch-0004-step-000000")
    assert stored.newest_good(pytest.fail).position == Position(3, 0)
    assert hidden(root) == []


def test_what_cannot_be_removed_is_named(root, said, token_of_dead, monkeypatch):
    directory = unfinished(root, token_of_dead)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("candle_p1.checkpoints.leftovers.remove_tree", refuse)
    settle(root, said.append)
    assert len(said) == 1
    assert str(directory) in said[0]


def test_killed_while_it_writes(start, root, make_writer, save, said):
    """Neither is what was being written taken for a checkpoint, nor does it stay."""
    process = start([sys.executable, "-c", WRITE_FOREVER, root])
    second = "epoch-0002-step-000000"
    wait_until(lambda: list(root.glob(f".{second}*/arrays*")), 60, process)
    stored = CheckpointRoot(root)
    assert stored.newest_good(pytest.fail).position == Position(1, 0)
    assert list(root.glob(f".{second}*")), "its writer is alive"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert stored.newest_good(pytest.fail).position == Position(1, 0)
    assert hidden(root) == []
    writer = make_writer(after=stored.latest())
    assert save(writer, 2)
    assert stored.names() == ["epoch-0001-step-000000", second]
