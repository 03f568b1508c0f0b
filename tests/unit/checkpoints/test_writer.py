"""Saving: what is copied, what is waited for, and what happens if it fails."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time

import numpy as np
import pytest

from candle_p1.checkpoints import commit, shard_file
from candle_p1.checkpoints.manifest import FileEntry
from candle_p1.checkpoints.root import CheckpointRoot
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.errors import CheckpointError
from candle_p1.failure import progress
from candle_p1.records.types import Position
from tests.conftest import wait_until
from tests.unit.checkpoints.conftest import latest
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

    monkeypatch.setattr(shard_file.os, "fsync", slow)
    yield gate
    gate.set()


def fail_at(monkeypatch, function, code):
    call = getattr(os, function)

    def fail(target, *args, **options):
        if function == "open" and "arrays" not in str(target):
            return call(target, *args, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shard_file.os, function, fail)


def sources(state):
    return {name: ArrayInMemory(array) for name, array in state.items()}


def left(root):
    return [path.name for path in root.iterdir() if not path.name.endswith(".lock")]


def test_what_is_saved_is_read(make_writer, state, root):
    seed = np.arange(4, dtype=np.uint32)
    facts = {"loss": [0.5]}
    assert make_writer().save(Position(2, 30), sources(state), {"seed": seed}, facts, wait=True)

    checkpoint = CheckpointRoot(root).newest_good(pytest.fail)
    assert checkpoint.directory.name == "epoch-0002-step-000030"
    assert checkpoint.position == Position(2, 30)
    assert checkpoint.facts == facts
    assert checkpoint.arrays.keys() == state.keys()
    for name, array in state.items():
        values = checkpoint.read(name)
        assert values.dtype == array.dtype
        np.testing.assert_array_equal(values, array)
    np.testing.assert_array_equal(checkpoint.rank_states()[0]["seed"], seed)


def test_a_save_is_of_the_moment_it_was_called(make_writer, state, root, gate):
    writer = make_writer()
    before = state["weights/kernel"].copy()
    seed = np.arange(3)
    assert writer.save(Position(1, 0), sources(state), {"seed": seed}, {})
    assert writer.writing
    assert CheckpointRoot(root).names() == [], "before it is on the disk"
    assert not (root / "latest").is_symlink()
    state["weights/kernel"][:] = 0
    seed[:] = 0
    gate.set()
    statistics = writer.close()
    assert [each.name for each in statistics.written] == ["epoch-0001-step-000000"]
    saved = latest(root)
    np.testing.assert_array_equal(saved.read("weights/kernel"), before)
    np.testing.assert_array_equal(saved.rank_states()[0]["seed"], np.arange(3))


def test_one_that_is_being_written_is_not_overtaken(make_writer, save, root, said, gate):
    writer = make_writer()
    assert save(writer, 1, wait=False)
    assert not save(writer, 2, wait=False)
    assert len(said) == 1
    assert "epoch 2" in said[0]
    gate.set()
    assert save(writer, 3)
    statistics = writer.close()
    assert statistics.num_not_taken == 1
    assert [each.position.epoch for each in statistics.saves] == [1, 3]
    assert CheckpointRoot(root).names() == ["epoch-0001-step-000000", "epoch-0003-step-000000"]


def test_the_best_waits_for_the_one_before(make_writer, save, root, gate):
    writer = make_writer()
    assert save(writer, 1, wait=False)
    threading.Timer(0.1, gate.set).start()
    assert save(writer, 2, wait=False, best=True)
    assert writer.close().num_not_taken == 0
    assert (root / "best").readlink().name == "epoch-0002-step-000000"


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


def test_memory_is_used_again_and_statistics_say_what_it_cost(make_writer, save, state, root):
    writer = make_writer()
    writer.prepare(sources(state))
    memory = writer._memory
    for epoch in (1, 2):
        assert save(writer, epoch)
        assert writer._memory is memory
    num_bytes = sum(array.nbytes for array in state.values())
    assert num_bytes <= memory.num_bytes <= num_bytes + 4096
    state["weights/more"] = np.arange(100_000)
    assert save(writer, 3)
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
    assert len(said) == 1
    assert os.strerror(code) in said[0]
    assert "epoch-0001-step-000000" in said[0], "which is the newest"
    assert sorted(left(root)) == ["epoch-0001-step-000000", "latest"]

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
    assert sorted(path.name for path in root.iterdir()) == ["epoch-0001-step-000000", "latest"]


def test_a_lock_that_cannot_be_signed_does_not_stay(make_writer, save, root, said, monkeypatch):
    with monkeypatch.context() as patch:
        fail_at(patch, "pwrite", errno.ENOSPC)
        writer = make_writer()
    assert os.strerror(errno.ENOSPC) in said[0]
    assert list(root.iterdir()) == []
    assert save(writer), "as soon as it is possible"


def test_a_file_in_place_of_the_directory(make_writer, save, root, said):
    root.write_text("something else")
    with pytest.raises(CheckpointError, match="--ckpt_directory"):
        make_writer(required=True)
    writer = make_writer()
    assert len(said) == 1
    assert str(root) in said[0]
    assert not save(writer)
    root.unlink()
    assert save(writer, 2), "as soon as it is possible"
    assert CheckpointRoot(root).names() == ["epoch-0002-step-000000"]


@pytest.fixture
def root(request, tmp_path):
    """The directory of the checkpoints; on a file system of its own if a test asks for one."""
    options = getattr(request, "param", None)
    if options is None:
        yield tmp_path / "ckpts"
        return
    directory = tmp_path / "mounted"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    try:
        subprocess.run(command, capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"file systems cannot be mounted: {error}")
    yield directory / "ckpts"
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.parametrize("root", ["size=600k"], indirect=True)
def test_a_disk_that_is_full_and_later_read_only(make_writer, save, root, state, said):
    writer = make_writer()
    assert save(writer, 1)
    state["weights/more"] = np.zeros(500_000, np.uint8)
    assert not save(writer, 2)
    assert os.strerror(errno.ENOSPC) in said[0]
    assert sorted(left(root)) == ["epoch-0001-step-000000", "latest"]
    del state["weights/more"]
    assert save(writer, 3)
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(3, 0)

    writer._lock.release()  # an open file would keep it writable
    mount = ["mount", "-o", "remount,ro", str(root.parent)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("it cannot be made read-only")
    assert not save(writer, 4)
    assert os.strerror(errno.EROFS) in said[1]
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(3, 0)


def test_what_is_on_the_disk_is_compared_on_request(make_writer, save, root, said, monkeypatch):
    writer = make_writer(checksum=True)
    assert save(writer, 1)
    monkeypatch.setattr(
        commit, "file_entry", lambda *_, **__: FileEntry(bytes=1, xxh3_128=32 * "0")
    )
    assert not save(writer, 2)
    assert "arrays-0000.safetensors" in said[0]
    assert CheckpointRoot(root).names() == ["epoch-0001-step-000000"]


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
        patch.setattr(shard_file.os, refusing, refuse)
        assert save(writer)
    assert refused
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(1, 0)


def test_a_file_system_that_shows_an_earlier_size(make_writer, save, root, monkeypatch):
    """NFS may, as long as a file that another node wrote is not opened."""
    stat = type(root).stat

    def outdated(path, **options):
        found = stat(path, **options)
        if path.suffix != ".safetensors":
            return found
        return os.stat_result((*found[:6], 0, *found[7:10]))

    with monkeypatch.context() as patch:
        patch.setattr(type(root), "stat", outdated)
        assert save(make_writer())
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(1, 0)


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, ""), MemoryError()])
def test_no_memory_for_the_copy(make_writer, save, state, said, monkeypatch, error):
    def refuse(num_bytes):
        raise error

    writer = make_writer()
    monkeypatch.setattr("candle_p1.checkpoints.writer.CopyMemory", refuse)
    writer.prepare(sources(state))
    assert not save(writer)
    assert "memory" in said[0]


def test_a_bug_while_copying_is_not_swallowed(make_writer, state, root, said):
    class Broken(ArrayInMemory):
        def copy_into(self, rows, out):
            raise ZeroDivisionError

    arrays = {**sources(state), "weights/kernel": Broken(state["weights/kernel"])}
    writer = make_writer()
    with pytest.raises(ZeroDivisionError):
        writer.save(Position(1, 0), arrays, {}, {})
    writer.abandon()
    assert CheckpointRoot(root).names() == []
    assert said == []


def test_what_another_rank_gives_up_is_not_reported(make_writer, save, root, said, monkeypatch):
    def give_up(directory, shard, *_, **__):
        commit.leave_marker(directory, f"{shard}.failed-stopped")

    monkeypatch.setattr("candle_p1.checkpoints.writer.write_shard", give_up)
    assert not save(make_writer())
    assert said == []
    assert left(root) == []


def test_a_rank_that_cannot_leave_a_marker_is_heard_of_when_the_ranks_meet(root, said, monkeypatch):
    """Of three ranks, one of which writes nothing."""
    write, leave = commit.write_synced, commit.leave_marker

    def write_others(path, *arguments):
        if path.name == commit.shard_name(1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *arguments)

    def leave_others(directory, name):
        if name.startswith("1."):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        leave(directory, name)

    def save_once(comm):
        writer = CheckpointWriter(comm, root, say=said.append)
        arrays = {"weights": ArrayInMemory(np.ones(250))}
        assert not writer.save(Position(1, 0), arrays, {}, {}, wait=True)
        return len(writer.close().errors)

    monkeypatch.setattr("candle_p1.checkpoints.arrays.SMALL_BYTES", 1000)
    monkeypatch.setattr(commit, "write_synced", write_others)
    monkeypatch.setattr(commit, "leave_marker", leave_others)
    assert SimulatedJob(3, ranks_per_node=3).run(save_once) == [1, 1, 1]
    (sentence,) = said
    assert os.strerror(errno.ENOSPC) in sentence
    assert left(root) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_without_memory_ends_the_checkpoint_and_not_the_run(
    root, said, monkeypatch, failing
):
    """The others have written their shards by then, so that nothing is left of it."""
    ended = []

    def write(path, *arguments):
        if path.name == commit.shard_name(failing):
            raise MemoryError
        time.sleep(0.2)
        ended.append(path.name)
        return write_synced(path, *arguments)

    def save_once(comm):
        writer = CheckpointWriter(comm, root, say=said.append)
        arrays = {"weights": ArrayInMemory(np.ones(250))}
        assert not writer.save(Position(1, 0), arrays, {}, {}, wait=True)
        if comm.rank == 0:
            assert left(root) == []
        return len(writer.close().errors)

    write_synced = commit.write_synced
    monkeypatch.setattr("candle_p1.checkpoints.arrays.SMALL_BYTES", 1000)
    monkeypatch.setattr(commit, "write_synced", write)
    assert SimulatedJob(3, ranks_per_node=3).run(save_once) == [1, 1, 1]
    assert "MemoryError" in said.pop()
    assert ended == [commit.shard_name(1 - failing)]


def test_a_shard_that_fails_too_late_does_not_bring_the_directory_back(tmp_path):
    with pytest.raises(MemoryError):
        commit.give_up_shard(tmp_path / "discarded", 0, MemoryError())
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_does_not_wait_for_the_disk(make_writer, save, root, gate):
    writer = make_writer()
    save(writer, 1, wait=False)
    writer.abandon()
    gate.set()
    writer._thread._thread.join(60)
    assert CheckpointRoot(root).names() in ([], ["epoch-0001-step-000000"])


@pytest.mark.parametrize("function", ["write_shard", "PendingCheckpoint.commit", "keep"])
def test_a_bug_in_a_thread_is_not_swallowed(make_writer, save, monkeypatch, function):
    def fail(*_, **__):
        raise ZeroDivisionError

    if function != "keep":
        monkeypatch.setattr(f"candle_p1.checkpoints.writer.{function}", fail)
    with pytest.raises(ZeroDivisionError):
        save(make_writer(keep=fail))
