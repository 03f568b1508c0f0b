"""Saving: what is copied, what is waited for, and what happens if it fails."""

import errno
import os
import threading
import time
from math import inf
from pathlib import Path

import numpy as np
import pytest

from candle_p1.checkpoints import commit, shards
from candle_p1.checkpoints.checkpoint import CheckpointRoot
from candle_p1.checkpoints.manifest import FileEntry
from candle_p1.checkpoints.shards import CopyMemory
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.errors import CheckpointError
from candle_p1.failure import progress
from candle_p1.records.types import Position
from tests.conftest import wait_until
from tests.unit.checkpoints.conftest import failing, latest, named, sources
from tools.simulated import ArrayInMemory, SimulatedJob


def test_the_watchdog_can_tell_who_waits_for_a_disk():
    memory, seen = memoryview(bytearray(progress.NUM_BYTES)).cast("q"), []
    progress.use(memory)

    def work(stop):
        wait_until(lambda: memory[progress.WAITING] == progress.FOR_DISK, 10)
        seen.append("waits")

    try:
        commit.CommitThread(work).join()
    finally:
        progress.stop()
    assert seen == ["waits"]


@pytest.fixture
def gate(monkeypatch):
    """The disk answers only once this is set."""
    gate, fsync = threading.Event(), os.fsync

    def slow(file):
        assert gate.wait(60)
        fsync(file)

    monkeypatch.setattr(shards.os, "fsync", slow)
    yield gate
    gate.set()


def fail_at(monkeypatch, function, code):
    call = getattr(os, function)

    def fail(target, *args, **options):
        if function == "open" and "arrays" not in str(target):
            return call(target, *args, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shards.os, function, fail)


def left(root):
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


class AlignedArray(ArrayInMemory):
    def copy_into(self, rows, out):
        assert out.ctypes.data % out.itemsize == 0
        super().copy_into(rows, out)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_is_saved_is_read(state, root, monkeypatch, num_ranks):
    def save(comm):
        writer = CheckpointWriter(comm, root, say=pytest.fail)
        aligned = {name: AlignedArray(array) for name, array in state.items()}
        assert writer.save(Position(2, 30), aligned, {"seed": np.arange(comm.rank)}, facts)
        writer.close()

    facts = {"loss": [0.5]}
    monkeypatch.setattr(shards, "SMALL_BYTES", 1000)
    SimulatedJob(num_ranks, ranks_per_node=num_ranks).run(save)
    checkpoint = CheckpointRoot(root).newest_good(pytest.fail)
    assert checkpoint.directory.name == "epoch-0002-step-000030"
    assert (checkpoint.position, checkpoint.facts) == (Position(2, 30), facts)
    assert checkpoint.arrays.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(checkpoint.read(name), array, strict=True)
    assert [len(own["seed"]) for own in checkpoint.rank_states()] == list(range(num_ranks))
    assert str(root) not in Path("/proc/self/maps").read_text(), "nothing of it stays open"


def test_a_save_is_of_the_moment_it_was_called(make_writer, state, root, gate):
    writer = make_writer()
    before = state["weights/kernel"].copy()
    seed, losses = np.arange(3), [1.0, inf]
    assert writer.save(Position(1, 0), sources(state), {"seed": seed}, {"loss": losses})
    assert writer.writing
    assert CheckpointRoot(root).names() == [], "before it is on the disk"
    assert not (root / "latest").is_symlink()
    state["weights/kernel"][:] = 0
    seed[:] = 0
    losses.clear()
    gate.set()
    assert [each.name for each in writer.close().written] == [named(1)]
    saved = latest(root)
    np.testing.assert_array_equal(saved.read("weights/kernel"), before)
    np.testing.assert_array_equal(saved.rank_states()[0]["seed"], np.arange(3))
    assert saved.facts == {"loss": [1.0, inf]}


def test_one_that_is_being_written_is_not_overtaken_but_the_best_waits_for_it(
    make_writer, save, root, said, gate
):
    writer = make_writer()
    assert save(writer, 1, wait=False)
    assert not save(writer, 2, wait=False)
    (sentence,) = said
    assert "epoch 2" in sentence
    threading.Timer(0.1, gate.set).start()
    assert save(writer, 3, wait=False, best=True)
    statistics = writer.close()
    assert statistics.num_not_taken == 1
    assert [each.position.epoch for each in statistics.saves] == [1, 3]
    assert CheckpointRoot(root).names() == [named(1), named(3)]
    assert (root / "best").readlink().name == named(3)


def test_a_best_one_that_fails_is_told_once(make_writer, save, monkeypatch):
    writer = make_writer()
    save(writer, 1, best=True)
    assert not writer.best_is_lost()
    with monkeypatch.context() as patch:
        fail_at(patch, "fsync", errno.EIO)
        save(writer, 2, best=True)
    save(writer, 3)
    assert writer.best_is_lost()
    assert not writer.best_is_lost()


def test_statistics_say_what_saving_cost(make_writer, save, state, root):
    writer = make_writer()
    writer.prepare(sources(state))
    num_bytes = sum(array.nbytes for array in state.values())
    assert save(writer, 1)
    state["weights/more"] = np.arange(100_000)
    assert save(writer, 2)
    np.testing.assert_array_equal(latest(root).read("weights/more"), np.arange(100_000))
    statistics = writer.close()
    assert writer.close() is statistics
    for saved in statistics.saves:
        assert 0 < saved.written_s <= saved.wait_s
        assert saved.num_bytes >= num_bytes
        assert saved.error is None


@pytest.mark.parametrize(
    ("function", "code"),
    [("write", errno.ENOSPC), ("fsync", errno.EDQUOT), ("open", errno.EACCES)],
)
def test_an_error_ends_the_checkpoint_and_not_the_run(
    make_writer, save, root, said, monkeypatch, function, code
):
    writer = make_writer()
    with monkeypatch.context() as patch:
        fail_at(patch, function, code)
        assert not save(writer, 1)
    assert "there is none yet" in said.pop()
    assert save(writer, 1)
    with monkeypatch.context() as patch:
        fail_at(patch, function, code)
        assert not save(writer, 2)
    (sentence,) = said
    assert os.strerror(code) in sentence
    assert named(1) in sentence, "which is the newest"
    assert left(root) == [named(1), "latest"]

    assert save(writer, 3)
    statistics = writer.close()
    assert [each.position.epoch for each in statistics.written] == [1, 3]
    assert len(statistics.errors) == 2
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(3, 0)


@pytest.mark.parametrize("noticed", ["by the next save", "by waiting", "at the end"])
def test_a_required_checkpoint_that_fails_ends_the_run(
    make_writer, save, root, said, monkeypatch, noticed
):
    writer = make_writer(required=True)
    assert save(writer, 1)
    fail_at(monkeypatch, "write", errno.ENOSPC)
    if noticed != "by waiting":
        assert save(writer, 2, wait=False)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        writer.close() if noticed == "at the end" else save(writer, 3)
    assert caught.value.agreed
    assert said == []
    assert len(writer.close().errors) == 1
    assert sorted(path.name for path in root.iterdir()) == [named(1), "latest"]


def test_a_lock_that_cannot_be_signed_does_not_stay(make_writer, save, root, said, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.ENOSPC))
        writer = make_writer()
    assert os.strerror(errno.ENOSPC) in said[0]
    assert list(root.iterdir()) == []
    assert save(writer), "as soon as it is possible"


def test_a_file_in_place_of_the_directory(make_writer, save, root, said):
    root.write_text("something else")
    with pytest.raises(CheckpointError, match="--ckpt_directory"):
        make_writer(required=True)
    writer = make_writer()
    (sentence,) = said
    assert str(root) in sentence
    assert not save(writer)
    root.unlink()
    assert save(writer, 2), "as soon as it is possible"
    assert CheckpointRoot(root).names() == [named(2)]


def test_what_is_on_the_disk_is_compared_on_request(make_writer, save, root, said, monkeypatch):
    writer = make_writer(checksum=True)
    assert save(writer, 1)
    other = FileEntry(bytes=1, xxh3_128=32 * "0")
    monkeypatch.setattr(commit, "file_entry", lambda *_, **__: other)
    assert not save(writer, 2)
    assert "arrays-0000.safetensors" in said[0]
    assert CheckpointRoot(root).names() == [named(1)]


@pytest.mark.parametrize("refusing", ["open", "write"])
def test_a_file_system_that_has_no_direct_writing(make_writer, save, root, monkeypatch, refusing):
    """Some refuse to open files for it, others to write."""
    call, refused = getattr(os, refusing), []

    def refuse(target, data, *args):
        if (data & os.O_DIRECT) if refusing == "open" else not refused:
            refused.append(target)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(target, data, *args)

    writer = make_writer(checksum=True)
    with monkeypatch.context() as patch:
        patch.setattr(shards.os, refusing, refuse)
        assert save(writer)
    assert refused
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(1, 0)


def test_a_file_system_that_shows_an_earlier_size(make_writer, save, root, monkeypatch):
    """NFS may, as long as a file that another node wrote is not opened."""
    stat = Path.stat

    def outdated(path, **options):
        found = stat(path, **options)
        size = 0 if path.suffix == ".safetensors" else found.st_size
        return os.stat_result((*found[:6], size, *found[7:10]))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", outdated)
        assert save(make_writer())
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(1, 0)


def test_no_memory_for_the_copy(make_writer, save, state, said, monkeypatch):
    writer = make_writer()
    monkeypatch.setattr("candle_p1.checkpoints.writer.CopyMemory", failing(errno.ENOMEM))
    writer.prepare(sources(state))
    assert not save(writer)
    assert "Cannot allocate memory" in said[0]


def test_what_another_rank_gives_up_is_not_reported(make_writer, save, root, said, monkeypatch):
    def give_up(directory, shard, *_, **__):
        commit.leave_marker(directory, f"{shard}.failed-stopped")

    monkeypatch.setattr("candle_p1.checkpoints.writer.write_shard", give_up)
    assert not save(make_writer())
    assert said == left(root) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_memory_ends_the_checkpoint_and_not_the_run(root, said, monkeypatch, victim):
    """The others have written their shards by then, so that nothing is left of it."""
    ended = []

    def write(path, *arguments):
        if path.name == commit.shard_name(victim):
            raise MemoryError
        time.sleep(0.2)
        ended.append(path.name)
        return write_synced(path, *arguments)

    def save_once(comm):
        writer = CheckpointWriter(comm, root, say=said.append)
        weights = {"weights": ArrayInMemory(np.ones(250))}
        assert not writer.save(Position(1, 0), weights, {}, {}, wait=True)
        if comm.rank == 0:
            assert left(root) == []
        return len(writer.close().errors)

    write_synced = commit.write_synced
    monkeypatch.setattr(shards, "SMALL_BYTES", 1000)
    monkeypatch.setattr(commit, "write_synced", write)
    assert SimulatedJob(3, ranks_per_node=3).run(save_once) == [1, 1, 1]
    assert "MemoryError" in said.pop()
    assert ended == [commit.shard_name(1 - victim)]


def test_a_shard_that_fails_too_late_does_not_bring_the_directory_back(tmp_path, monkeypatch):
    def fail(path, *_):
        path.parent.rmdir()  # as rank 0 does that has discarded the checkpoint
        raise MemoryError

    monkeypatch.setattr(commit, "write_synced", fail)
    with pytest.raises(MemoryError):
        commit.write_shard(tmp_path / "discarded", 0, CopyMemory(1), False, threading.Event())
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_does_not_wait_for_the_disk(make_writer, save, root, gate):
    writer = make_writer()
    save(writer, 1, wait=False)
    wait_until(lambda: any(each.stat().st_size for each in root.glob(".epoch*/arrays*")), 10)
    writer.abandon()
    assert writer.writing


@pytest.mark.parametrize("function", ["write_shard", "PendingCheckpoint.commit", "keep"])
def test_a_bug_in_a_thread_is_not_swallowed(make_writer, save, monkeypatch, function):
    def fail(*_, **__):
        raise ZeroDivisionError

    if function != "keep":
        monkeypatch.setattr(f"candle_p1.checkpoints.writer.{function}", fail)
    with pytest.raises(ZeroDivisionError):
        save(make_writer(keep=fail))
