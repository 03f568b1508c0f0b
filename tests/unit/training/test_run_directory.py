"""Which run a command continues, and where."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.checkpoints.lock import take_lock
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import ParameterError
from candle_p1.records.record import (
    RECORD_NAME,
    begin_record,
    end_record,
    make_record,
    read_record,
    utc_now,
    write_record,
)
from candle_p1.records.types import Failure, Position
from candle_p1.training import run_directory
from candle_p1.training.fingerprint import SavedRun, TrainingState
from candle_p1.training.run_directory import LOCK_NAME, RunDirectory
from tests.planted_records import planted_record
from tests.unit.checkpoints.test_lock import refuse_locks
from tools.simulated import ArrayInMemory

NT3 = find_benchmark("nt3")
FLAGS = ["--ckpt_save_interval", "1", "--epochs", "4"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    for name in ("WATCHDOG_EXIT_S", "NOTICE_S"):
        monkeypatch.setattr(run_directory, name, 0.0)


class Watchdog:
    """In place of the client: takes note of the record."""

    def report_record(self, record):
        self.record = record


def parameters(tmp_path, *flags):
    return NT3.read_parameters([*FLAGS, "--output_dir", str(tmp_path), *flags])


def record_of(params, **facts):
    return make_record({
        "schema_version": 3, "status": "running", "benchmark": "nt3", "started": utc_now(),
        "num_ranks": 2,
        "parameters": {
            name: {"value": value, "origin": str(params.origin(name))}
            for name, value in params.items()
        },
    } | facts)  # fmt: skip


def save(root, directory, *positions, segment=1, steps=5):
    """Saves checkpoints as a run in a directory does."""
    writer = CheckpointWriter(SerialCommunicator(), root)
    state = TrainingState(
        benchmark="nt3", parameters={}, data={}, plan={}, weights_only=False, learning_rate=0.1,
        stopped=False, policy={}, callbacks={}, epochs=[], num_samples=0,
        run=SavedRun(directory=str(directory), segment=segment, steps=steps),
    )  # fmt: skip
    arrays = {"weights/a": ArrayInMemory(np.arange(6, dtype=np.float32))}
    for position in positions:
        writer.save(Position(*position), arrays, {}, state.model_dump(), wait=True)
    writer.close()


def plant(params, directory, *, status="failed", saved=((1, 0),), steps=9, locked=True):
    """Leaves a directory as a run does that has ended with a status; returns it."""
    directory.mkdir(parents=True)
    if locked:
        lock = take_lock(directory / LOCK_NAME)
        lock.sign()
        lock.release()
    path = directory / RECORD_NAME
    if status == "ok":
        ok = planted_record("nt3", 2)
        known = {name: getattr(ok, name) for name in ok.model_fields_set}
        write_record(path, make_record(known | {"parameters": record_of(params).parameters}))
    else:
        begin_record(path, record_of(params))
        if status != "running":
            end_record(path, status, Failure(reason="rank 1 died", rank=1, steps=steps))
    if saved:
        save(directory / "ckpts", directory, *saved)
    return directory


def find(params):
    """Finds the directory of a run."""
    run = RunDirectory("nt3", params)
    run.find()
    return run


def open_place(params, **facts):
    """Opens a run as lifecycle does; returns what opened it, the directory, and the segment."""
    opening = find(params)
    directory, segment = opening.open(record_of(params, **facts), Watchdog())
    return opening, directory, segment


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_the_same_command_goes_on_in_the_same_directory_and_record(tmp_path, status):
    params = parameters(tmp_path)
    first = plant(params, tmp_path / "EXP000/RUN000", status=status, saved=((1, 0), (2, 3)))
    opening, directory, segment = open_place(params, num_ranks=4)
    assert (directory, segment) == (first, 2)
    assert opening.checkpoint.position == Position(2, 3)
    record = read_record(first / RECORD_NAME)
    assert (record.status, record.num_ranks) == ("running", 4)
    assert record.segments[0].lost_steps == (None if status == "running" else 4)
    assert record.segments[1].checkpoint == str(opening.checkpoint.directory)
    assert (first / f".{RECORD_NAME}.reserved").exists()
    assert any("segment 2" in note for note in opening.notes)
    # Another start of the command finds the run alive, and begins one of its own.
    assert open_place(params)[1] == tmp_path / "EXP000/RUN001"
    opening.close()
    assert open_place(params)[1] == first


def test_the_newest_of_several_runs_with_equal_parameters_is_taken(tmp_path):
    params = parameters(tmp_path)
    experiment = tmp_path / "EXP000"
    other = parameters(tmp_path, "--epochs", "8")
    plant(params, experiment / "RUN000")
    expected = plant(params, experiment / "RUN001")
    plant(params, experiment / "RUN002", saved=())
    plant(params, experiment / "RUN003", status="ok")
    plant(other, experiment / "RUN004")
    opening, directory, _ = open_place(params)
    assert directory == expected
    opening.close()
    assert open_place(other)[1] == experiment / "RUN004"
    finished = plant(params, experiment / "RUN005", status="ok")
    assert f"{finished} is not continued: it has finished" in find(params).notes


@pytest.mark.parametrize(
    ("flags", "goes_on"),
    [
        (["--ckpt_every_s", "30", "--loader", "chunked", "--timeout", "60"], True),
        (["--verbose", "True", "--eval_bool", "False"], True),
        (["--rng_seed", "1"], False),
        (["--ckpt_restart_mode", "off"], False),
        (["--ckpt_save_interval", "0"], False),
    ],
)
def test_only_what_decides_about_results_must_be_equal(tmp_path, flags, goes_on):
    plant(parameters(tmp_path), tmp_path / "EXP000/RUN000")
    directory = open_place(parameters(tmp_path, *flags))[1]
    assert (directory.name == "RUN000") == goes_on


def test_without_training_a_checkpoint_is_evaluated_in_a_run_of_its_own(tmp_path):
    first = plant(parameters(tmp_path), tmp_path / "EXP000/RUN000", saved=((1, 0), (2, 0)))
    untrained = ["--train_bool", "False"]
    for wrong in ([], ["--ckpt_directory", str(tmp_path)]):
        with pytest.raises(ParameterError, match=r"train_bool False .* no checkpoint"):
            find(parameters(tmp_path, *untrained, *wrong))
    named = parameters(tmp_path, *untrained, "--ckpt_directory", str(first / "ckpts"))
    opening, directory, _ = open_place(named)
    assert (directory.name, opening.checkpoint.position) == ("RUN001", Position(2, 0))
    assert read_record(first / RECORD_NAME).status == "failed"
    assert find(parameters(tmp_path, *untrained, "--eval_bool", "False"))


@pytest.mark.parametrize(
    "flags", [["--run_id", "JOB000"], ["--experiment_id", ".", "--run_id", "x"]]
)
def test_in_a_directory_that_the_user_has_chosen_a_run_goes_on_or_says_why_not(tmp_path, flags):
    params = parameters(tmp_path, *flags)
    directory = run_directory.run_directories("nt3", params)[0]
    plant(params, directory, saved=())
    opening, found, segment = open_place(params)
    assert (found, segment, opening.checkpoint) == (directory, 2, None)
    segments = read_record(directory / RECORD_NAME).segments
    assert (segments[0].lost_steps, segments[1].checkpoint) == (9, None)
    with pytest.raises(ParameterError, match="it is running"):
        find(params)
    opening.close()
    with pytest.raises(ParameterError, match="the run has epochs = 4, this run epochs = 8"):
        find(parameters(tmp_path, *flags, "--epochs", "8"))
    with pytest.raises(ParameterError, match="already holds the record of a run: choose"):
        find(parameters(tmp_path, *flags, "--ckpt_restart_mode", "off"))
    save(directory / "ckpts", directory, (1, 0))
    opening, found, segment = open_place(params)
    assert (found, segment, opening.checkpoint.position) == (directory, 3, Position(1, 0))


@pytest.mark.parametrize("damaged", ["latest", "best", "epoch-0002-step-000000/arrays-0000*"])
def test_what_is_damaged_does_not_end_the_restart(tmp_path, damaged):
    params = parameters(tmp_path)
    directory = plant(params, tmp_path / "EXP000/RUN000", saved=((1, 0), (2, 0)))
    harmed = directory / "ckpts" / damaged
    if damaged in ("latest", "best"):  # leads to nothing
        harmed.unlink(missing_ok=True)
        harmed.symlink_to("epoch-0009")
    else:
        (harmed,) = harmed.parent.glob(harmed.name)
        harmed.write_bytes(harmed.read_bytes()[:-1])
    place = find(params)
    number = 2 if damaged in ("latest", "best") else 1
    assert (place.path, place.checkpoint.position) == (directory, Position(number, 0))
    assert any(str(harmed) in note for note in place.notes) is (damaged != "best")


def test_required_without_a_checkpoint_is_an_error_and_leaves_nothing_locked(tmp_path):
    params = parameters(tmp_path, "--ckpt_restart_mode", "required")
    with pytest.raises(ParameterError, match="no checkpoint to continue from"):
        find(params)
    plant(params, tmp_path / "EXP000/RUN000", saved=())
    with pytest.raises(ParameterError, match="RUN000 is not continued: it has no checkpoint"):
        find(params)
    save(tmp_path / "EXP000/RUN000/ckpts", tmp_path / "EXP000/RUN000", (1, 0))
    assert find(params).continues_record


def test_checkpoints_in_a_named_directory_say_which_run_goes_on(tmp_path):
    params = parameters(tmp_path, "--ckpt_directory", str(tmp_path / "c"))
    first = plant(params, tmp_path / "EXP000/RUN000", saved=())
    second = plant(params, tmp_path / "EXP000/RUN001", saved=())
    save(tmp_path / "c", first, (2, 0))
    save(tmp_path / "c", second, (1, 0))
    save(tmp_path / "c", first, (3, 0))
    opening, directory, _ = open_place(params)
    assert (directory, opening.checkpoint.position) == (first, Position(3, 0))


def test_a_run_of_another_directory_goes_on_in_a_new_one_with_its_segments(tmp_path):
    params = parameters(tmp_path / "a", "--ckpt_directory", str(tmp_path / "c"))
    owner = plant(params, tmp_path / "a/EXP000/RUN000", saved=())
    save(tmp_path / "c", owner, (2, 0))
    before = (owner / RECORD_NAME).read_bytes()
    here = parameters(tmp_path / "b", "--ckpt_directory", str(tmp_path / "c"))
    opening, directory, segment = open_place(here)
    assert (directory, segment) == (tmp_path / "b/EXP000/RUN000", 2)
    assert opening.checkpoint.position == Position(2, 0)
    assert read_record(directory / RECORD_NAME).segments[0].lost_steps == 4
    # An equal command does not continue it once more while it lives.
    second = find(here)
    assert (second.path.name, second.checkpoint) == ("RUN001", None)
    assert any("it is running" in note for note in second.notes)
    second.close()
    assert len(opening.lock_descriptors) == 2
    assert (owner / RECORD_NAME).read_bytes() == before
    opening.close()
    held = take_lock(owner / LOCK_NAME)
    place = find(here)
    assert place.checkpoint is None
    assert any("it is running" in note for note in place.notes)
    held.release()
    place.close()
    flags = ["--ckpt_directory", str(tmp_path / "c"), "--run_id", "RUN000"]
    opening, found, segment = open_place(parameters(tmp_path / "b", *flags))
    assert (found, segment, opening.checkpoint.position) == (directory, 3, Position(2, 0))


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_checkpoint_of_another_run_is_not_taken_from_a_shared_directory(tmp_path, mode):
    flags = ["--ckpt_directory", str(tmp_path / "c"), "--run_id", "mine"]
    params = parameters(tmp_path, *flags, "--ckpt_restart_mode", mode)
    mine = plant(params, tmp_path / "EXP000/mine", saved=())
    save(tmp_path / "c", tmp_path / "EXP000/other", (4, 0))
    if mode == "required":
        with pytest.raises(ParameterError, match="is not of the run in"):
            find(params)
        return
    opening, found, segment = open_place(params)
    assert (found, segment, opening.checkpoint) == (mine, 2, None)
    assert any("is not of the run in" in note for note in opening.notes)
    opening.close()
    save(tmp_path / "c", mine, (1, 0))
    opening, found, segment = open_place(params)
    assert (found, segment, opening.checkpoint.position) == (mine, 3, Position(1, 0))


def test_without_locks_a_run_that_may_be_alive_is_never_taken_over(tmp_path, monkeypatch):
    params = parameters(tmp_path)
    plant(params, tmp_path / "EXP000/RUN000", status="running")
    ended = plant(parameters(tmp_path, "--rng_seed", "1"), tmp_path / "EXP000/RUN001")
    refuse_locks(monkeypatch, errno.ENOSYS)
    assert find(params).path.name == "RUN002"
    # A run whose record says how it ended goes on, once.
    again = parameters(tmp_path, "--rng_seed", "1")
    assert find(again).path == ended
    place = find(again)
    assert place.path.name == "RUN002"
    assert any("another process continues it" in note for note in place.notes)


def test_a_record_that_says_running_without_a_lock_is_left_alone(tmp_path):
    params = parameters(tmp_path)
    plant(params, tmp_path / "EXP000/RUN000", status="running", locked=False)
    place = find(params)
    assert place.path.name == "RUN001"
    assert any("cannot be told" in note for note in place.notes)


@pytest.mark.parametrize("continues", [False, True])
def test_of_equal_commands_at_the_same_moment_each_has_a_directory(tmp_path, continues):
    """Only one of them continues the run that was there."""

    def start():
        barrier.wait()
        found.append(open_place(params))

    params = parameters(tmp_path, "--ckpt_save_interval", str(int(continues)))
    if continues:
        plant(params, tmp_path / "EXP000/RUN000")
    found, barrier = [], threading.Barrier(8)
    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [(f"RUN{i:03d}", 2 if continues and i == 0 else 1) for i in range(8)]
    assert sorted((directory.name, segment) for _, directory, segment in found) == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ParameterError, match="output_dir"):
        find(parameters(tmp_path))
