"""Saving: what is copied, what is waited for, and what happens if it fails."""

from __future__ import annotations

import errno
import os
import subprocess
import threading

import numpy as np
import pytest

from candle_p1.checkpoints import job, part_file
from candle_p1.checkpoints.manifest import FileEntry, Position
from candle_p1.checkpoints.part_file import WritingStoppedError
from candle_p1.checkpoints.root import CheckpointRoot
from candle_p1.checkpoints.source import ArrayInMemory
from candle_p1.distributed import progress
from candle_p1.errors import CheckpointError


def test_the_watchdog_can_tell_who_waits_for_a_disk():
    memory, seen = memoryview(bytearray(progress.NUM_BYTES)).cast("q"), []
    progress.use(memory)
    try:
        part = job.PartJob(None)
        part._thread = threading.Thread(target=lambda: seen.append(begun.wait(10)))
        begun, join = threading.Event(), part._thread.join

        def note_and_join():
            seen.append(memory[progress.WAITING])
            begun.set()
            join()

        part._thread.join = note_and_join
        part._thread.start()
        part.join()
    finally:
        progress.stop()
    assert seen == [progress.FOR_DISK, True]


@pytest.fixture
def gate(monkeypatch):
    """The disk answers only once this is set."""
    gate, fsync = threading.Event(), os.fsync

    def slow(file):
        assert gate.wait(60)
        fsync(file)

    monkeypatch.setattr(part_file.os, "fsync", slow)
    yield gate
    gate.set()


def fail_at(monkeypatch, function, code):
    call = getattr(os, function)

    def fail(target, *args, **options):
        if function == "open" and "arrays" not in str(target):
            return call(target, *args, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(part_file.os, function, fail)


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
    np.testing.assert_array_equal(checkpoint.rank_state(0)["seed"], seed)
    assert checkpoint.rank_state(1) == {}


def test_a_save_is_of_the_moment_it_was_called(make_writer, state, root, gate):
    writer = make_writer()
    before = state["weights/kernel"].copy()
    seed = np.arange(3)
    assert writer.save(Position(1, 0), sources(state), {"seed": seed}, {})
    assert writer.writing
    state["weights/kernel"][:] = 0
    seed[:] = 0
    gate.set()
    statistics = writer.close()
    assert [each.name for each in statistics.written] == ["epoch-0001-step-000000"]
    latest = CheckpointRoot(root).latest()
    np.testing.assert_array_equal(latest.read("weights/kernel"), before)
    np.testing.assert_array_equal(latest.rank_state(0)["seed"], np.arange(3))


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


def test_nothing_has_its_name_before_it_is_on_the_disk(make_writer, save, root, gate):
    writer = make_writer()
    save(writer, 1, wait=False)
    assert CheckpointRoot(root).names() == []
    assert not (root / "latest").is_symlink()
    gate.set()
    writer.close()
    assert CheckpointRoot(root).names() == ["epoch-0001-step-000000"]


def test_memory_for_the_copy_is_used_again(make_writer, save, state):
    writer = make_writer()
    writer.prepare(sources(state))
    memory = writer._memory
    for epoch in (1, 2):
        assert save(writer, epoch)
        assert writer._memory is memory
    num_bytes = sum(array.nbytes for array in state.values())
    assert num_bytes <= writer.close().copy_bytes <= num_bytes + 4096


def test_arrays_may_change_between_saves(make_writer, save, state, root):
    writer = make_writer()
    assert save(writer, 1)
    state["weights/more"] = np.arange(100_000)
    assert save(writer, 2)
    stored = CheckpointRoot(root)
    np.testing.assert_array_equal(stored.latest().read("weights/more"), np.arange(100_000))


def test_statistics_say_what_it_cost(make_writer, save, state):
    writer = make_writer()
    assert save(writer)
    statistics = writer.close()
    (saved,) = statistics.saves
    assert 0 < saved.written_s <= saved.wait_s
    assert saved.num_bytes >= sum(array.nbytes for array in state.values())
    assert saved.num_writers == 1
    assert statistics.errors == []
    assert writer.close() is statistics


FAILURES = [
    ("write", errno.ENOSPC),
    ("write", errno.EIO),
    ("fsync", errno.EDQUOT),
    ("open", errno.EACCES),
    ("open", errno.EROFS),
]


@pytest.mark.parametrize(("function", "code"), FAILURES)
def test_an_error_ends_the_checkpoint_and_not_the_run(
    make_writer, save, root, said, monkeypatch, function, code
):
    writer = make_writer()
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
    assert len(statistics.errors) == 1
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(3, 0)


def test_a_required_checkpoint_that_fails_ends_the_run(make_writer, save, root, said, monkeypatch):
    writer = make_writer(required=True)
    assert save(writer, 1)
    fail_at(monkeypatch, "write", errno.ENOSPC)
    assert save(writer, 2, wait=False)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        save(writer, 3)
    assert caught.value.agreed
    assert said == []
    assert len(writer.close().errors) == 1


def test_a_required_checkpoint_that_is_waited_for_ends_the_run(make_writer, save, monkeypatch):
    writer = make_writer(required=True)
    fail_at(monkeypatch, "write", errno.ENOSPC)
    with pytest.raises(CheckpointError):
        save(writer, 1)
    assert len(writer.close().errors) == 1


def test_the_last_required_checkpoint_ends_the_run_too(make_writer, save, monkeypatch):
    writer = make_writer(required=True)
    fail_at(monkeypatch, "write", errno.ENOSPC)
    assert save(writer, 1, wait=False)
    with pytest.raises(CheckpointError):
        writer.close()
    assert len(writer.close().errors) == 1


def test_a_file_in_place_of_the_directory(make_writer, save, root, said):
    root.write_text("something else")
    writer = make_writer()
    assert len(said) == 1
    assert str(root) in said[0]
    assert not save(writer)
    root.unlink()
    assert save(writer, 2), "as soon as it is possible"
    assert CheckpointRoot(root).names() == ["epoch-0002-step-000000"]


def test_a_file_in_place_of_a_required_directory(make_writer, root):
    root.write_text("something else")
    with pytest.raises(CheckpointError, match="--ckpt_directory"):
        make_writer(required=True)


def mounted(tmp_path, options):
    """Returns a small file system, or skips the test."""
    directory = tmp_path / "mounted"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted: {done.stderr.decode().strip()}")
    return directory


@pytest.fixture
def root(request, tmp_path):
    """The directory of the checkpoints; on a small file system if a test asks for one."""
    options = getattr(request, "param", None)
    if options is None:
        yield tmp_path / "ckpts"
        return
    directory = mounted(tmp_path, options)
    yield directory / "ckpts"
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.parametrize("root", ["size=600k"], indirect=True)
def test_a_full_disk(make_writer, save, root, state, said):
    writer = make_writer()
    assert save(writer, 1)
    state["weights/more"] = np.zeros(500_000, np.uint8)
    assert not save(writer, 2)
    assert os.strerror(errno.ENOSPC) in said[0]
    assert sorted(left(root)) == ["epoch-0001-step-000000", "latest"]
    del state["weights/more"]
    assert save(writer, 3)
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(3, 0)


@pytest.mark.parametrize("root", ["size=600k"], indirect=True)
def test_a_file_system_that_has_become_read_only(make_writer, save, root, said):
    writer = make_writer()
    assert save(writer, 1)
    mount = ["mount", "-o", "remount,ro", str(root.parent)]
    writer._claim.release(root)  # an open file would keep it writable
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("it cannot be made read-only")
    assert not save(writer, 2)
    assert os.strerror(errno.EROFS) in said[0]
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(1, 0)


def test_what_is_on_the_disk_is_compared_on_request(make_writer, save, root, said, monkeypatch):
    writer = make_writer(checksum=True)
    assert save(writer, 1)
    monkeypatch.setattr(job, "file_entry", lambda *_, **__: FileEntry(bytes=1, xxh3_128=32 * "0"))
    assert not save(writer, 2)
    assert "arrays-0000.safetensors" in said[0]
    assert CheckpointRoot(root).names() == ["epoch-0001-step-000000"]


def test_a_file_system_that_has_no_direct_writing(make_writer, save, root, monkeypatch):
    """Some refuse to open files for it, others to write."""
    open_file, write = os.open, os.write

    def refuse_open(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_file(path, flags, *args)

    writer = make_writer(checksum=True)
    with monkeypatch.context() as patch:
        patch.setattr(part_file.os, "open", refuse_open)
        assert save(writer, 1)
    refused = []

    def refuse_first(file, data):
        if not refused:
            refused.append(file)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(file, data)

    monkeypatch.setattr(part_file.os, "write", refuse_first)
    assert save(writer, 2)
    assert CheckpointRoot(root).newest_good(pytest.fail).position == Position(2, 0)


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


def test_no_memory_for_the_copy(make_writer, save, said, monkeypatch):
    def refuse(num_bytes):
        raise MemoryError

    writer = make_writer()
    monkeypatch.setattr("candle_p1.checkpoints.writer.CopyMemory", refuse)
    assert not save(writer)
    assert "memory" in said[0]


def test_a_bug_in_a_thread_is_not_swallowed(make_writer, save, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    writer = make_writer()
    monkeypatch.setattr(job, "write_synced", fail)
    with pytest.raises(ZeroDivisionError):
        save(writer)


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


@pytest.mark.parametrize("wait", [False, True])
def test_training_is_said_to_go_on_only_if_it_does(make_writer, save, said, monkeypatch, wait):
    writer = make_writer()
    fail_at(monkeypatch, "write", errno.ENOSPC)
    save(writer, 1, wait=wait)
    writer._job._thread.join(60)
    assert len(said) == 1
    assert ("Training goes on" in said[0]) is not wait
    assert "there is no checkpoint yet" in said[0]


def test_what_another_rank_gives_up_is_not_reported(make_writer, save, root, said, monkeypatch):
    def give_up(task, stop):
        job.failure_marker(task.directory, task.part).write_text(job.why(WritingStoppedError()))

    monkeypatch.setattr(job.PartTask, "run", give_up)
    assert not save(make_writer())
    assert said == []
    assert left(root) == []


def test_a_run_that_fails_does_not_wait_for_the_disk(make_writer, save, root, gate):
    writer = make_writer()
    save(writer, 1, wait=False)
    writer.abandon()
    gate.set()
    writer._job._thread.join(60)
    assert CheckpointRoot(root).names() in ([], ["epoch-0001-step-000000"])


def test_a_policy_that_fails_is_a_bug(make_writer, save):
    def keep(stored):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(make_writer(keep=keep))
