"""Which run a command continues, and where."""

import errno
import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor

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
    write_record,
)
from candle_p1.records.types import Failure, Position
from candle_p1.training import run_directory
from candle_p1.training.restart import SavedRun, TrainingState
from candle_p1.training.run_directory import LOCK_NAME, RunDirectory
from tests.planted_records import planted_record
from tests.records import RUNNING
from tests.unit.checkpoints.conftest import failing
from tools.simulated import ArrayInMemory

NT3 = find_benchmark("nt3")
FLAGS = ["--ckpt_save_interval", "1", "--epochs", "4"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    for name in ("WATCHDOG_EXIT_S", "NOTICE_S"):
        monkeypatch.setattr(run_directory, name, 0.0)


class Watchdog:
    """In place of the client."""

    def report_record(self, record):
        pass


def parameters(tmp_path, *flags):
    return NT3.read_parameters([*FLAGS, "--output_dir", str(tmp_path), *flags])


def record_of(params, num_ranks=2):
    parameters = {
        name: {"value": value, "origin": str(params.origin(name))} for name, value in params.items()
    }
    return make_record(RUNNING | {"num_ranks": num_ranks, "parameters": parameters})


def save(root, directory, *positions):
    """Saves checkpoints as a run in a directory does."""
    writer = CheckpointWriter(SerialCommunicator(), root)
    state = TrainingState(
        benchmark="nt3", parameters={}, data={}, plan={}, weights_only=False, learning_rate=0.1,
        stopped=False, policy={}, callbacks={}, epochs=[], num_samples=0,
        run=SavedRun(directory=str(directory), segment=1, steps=5),
    )  # fmt: skip
    arrays = {"weights/a": ArrayInMemory(np.arange(6, dtype=np.float32))}
    for position in positions:
        writer.save(Position(*position), arrays, {}, state.model_dump(), wait=True)
    writer.close()


def plant(params, directory, *saved, status="failed"):
    """Leaves a directory as a run does that has ended with a status; returns it."""
    directory.mkdir(parents=True)
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
            end_record(path, status, Failure(reason="rank 1 died", rank=1, steps=9))
    if saved:
        save(directory / "ckpts", directory, *saved)
    return directory


def find(params):
    """Finds the directory of a run."""
    run = RunDirectory("nt3", params)
    run.find()
    return run


def open_place(params, num_ranks=2):
    """Opens a run as lifecycle does; returns what opened it, and (directory, segment, position)."""
    opening = find(params)
    place = opening.open(record_of(params, num_ranks), Watchdog())
    return opening, (*place, opening.checkpoint and opening.checkpoint.position)


def has_note(opening, text):
    return any(text in note for note in opening.notes)


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_the_same_command_goes_on_in_the_same_directory_and_record(tmp_path, status):
    params = parameters(tmp_path)
    first = plant(params, tmp_path / "EXP000/RUN000", (1, 0), (2, 3), status=status)
    opening, place = open_place(params, num_ranks=4)
    assert place == (first, 2, Position(2, 3))
    record = read_record(first / RECORD_NAME)
    assert (record.status, record.num_ranks) == ("running", 4)
    assert record.segments[0].lost_steps == (None if status == "running" else 4)
    assert record.segments[1].checkpoint == str(opening.checkpoint.directory)
    assert (first / f".{RECORD_NAME}.reserved").exists()
    assert has_note(opening, "segment 2")
    # Another start of the command finds the run alive, and begins one of its own.
    assert open_place(params)[1] == (tmp_path / "EXP000/RUN001", 1, None)
    opening.close()
    assert open_place(params)[1][0] == first


def test_the_newest_of_several_runs_with_equal_parameters_is_taken(tmp_path):
    params, other = parameters(tmp_path), parameters(tmp_path, "--epochs", "8")
    experiment = tmp_path / "EXP000"
    plant(params, experiment / "RUN000", (1, 0))
    expected = plant(params, experiment / "RUN001", (1, 0))
    plant(params, experiment / "RUN002")
    plant(params, experiment / "RUN003", (1, 0), status="ok")
    plant(other, experiment / "RUN004", (1, 0))
    opening, place = open_place(params)
    assert place[0] == expected
    opening.close()
    assert open_place(other)[1][0] == experiment / "RUN004"
    finished = plant(params, experiment / "RUN005", (1, 0), status="ok")
    assert has_note(find(params), f"{finished} is not continued: it has finished")


@pytest.mark.parametrize(
    ("flags", "goes_on"),
    [
        ("--ckpt_every_s 30 --loader chunked --timeout 60 --verbose True --eval_bool False", True),
        ("--rng_seed 1", False),
        ("--ckpt_restart_mode off", False),
        ("--ckpt_save_interval 0", False),
    ],
)
def test_only_what_decides_about_results_must_be_equal(tmp_path, flags, goes_on):
    plant(parameters(tmp_path), tmp_path / "EXP000/RUN000", (1, 0))
    _, (directory, *_) = open_place(parameters(tmp_path, *flags.split()))
    assert (directory.name == "RUN000") == goes_on


def test_without_training_a_checkpoint_is_evaluated_in_a_run_of_its_own(tmp_path):
    first = plant(parameters(tmp_path), tmp_path / "EXP000/RUN000", (1, 0), (2, 0))
    untrained = ["--train_bool", "False"]
    for wrong in ([], ["--ckpt_directory", str(tmp_path)]):
        with pytest.raises(ParameterError, match=r"train_bool False .* no checkpoint"):
            find(parameters(tmp_path, *untrained, *wrong))
    named = parameters(tmp_path, *untrained, "--ckpt_directory", str(first / "ckpts"))
    assert open_place(named)[1] == (tmp_path / "EXP000/RUN001", 1, Position(2, 0))
    assert read_record(first / RECORD_NAME).status == "failed"
    assert find(parameters(tmp_path, *untrained, "--eval_bool", "False"))


@pytest.mark.parametrize(
    "flags", [["--run_id", "JOB000"], ["--experiment_id", ".", "--run_id", "x"]]
)
def test_in_a_directory_that_the_user_has_chosen_a_run_goes_on_or_says_why_not(tmp_path, flags):
    params = parameters(tmp_path, *flags)
    (directory,) = run_directory.run_directories("nt3", params)
    plant(params, directory)
    opening, place = open_place(params)
    assert place == (directory, 2, None)
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
    assert open_place(params)[1] == (directory, 3, Position(1, 0))


@pytest.mark.parametrize("damaged", ["latest", "best", "epoch-0002-step-000000/ranks.safetensors"])
def test_what_is_damaged_does_not_end_the_restart(tmp_path, damaged):
    params = parameters(tmp_path)
    directory = plant(params, tmp_path / "EXP000/RUN000", (1, 0), (2, 0))
    harmed = directory / "ckpts" / damaged
    harmed.unlink(missing_ok=True)
    if damaged in ("latest", "best"):  # leads to nothing
        harmed.symlink_to("epoch-0009")
    found = find(params)
    number = 2 if damaged in ("latest", "best") else 1
    assert (found.path, found.checkpoint.position) == (directory, Position(number, 0))
    assert has_note(found, str(harmed)) is (damaged != "best")


def test_required_without_a_checkpoint_is_an_error_and_leaves_nothing_locked(tmp_path):
    params = parameters(tmp_path, "--ckpt_restart_mode", "required")
    with pytest.raises(ParameterError, match="no checkpoint to continue from"):
        find(params)
    directory = plant(params, tmp_path / "EXP000/RUN000")
    with pytest.raises(ParameterError, match="RUN000 is not continued: it has no checkpoint"):
        find(params)
    save(directory / "ckpts", directory, (1, 0))
    assert find(params).continues_record


def test_checkpoints_in_a_named_directory_say_which_run_goes_on(tmp_path):
    params = parameters(tmp_path, "--ckpt_directory", str(tmp_path / "c"))
    first, second = (plant(params, tmp_path / f"EXP000/RUN00{i}") for i in range(2))
    save(tmp_path / "c", first, (2, 0))
    save(tmp_path / "c", second, (1, 0))
    save(tmp_path / "c", first, (3, 0))
    assert open_place(params)[1] == (first, 2, Position(3, 0))


def test_a_run_of_another_directory_goes_on_in_a_new_one_with_its_segments(tmp_path):
    params = parameters(tmp_path / "a", "--ckpt_directory", str(tmp_path / "c"))
    owner = plant(params, tmp_path / "a/EXP000/RUN000")
    save(tmp_path / "c", owner, (2, 0))
    before = (owner / RECORD_NAME).read_bytes()
    here = parameters(tmp_path / "b", "--ckpt_directory", str(tmp_path / "c"))
    opening, place = open_place(here)
    assert place == (tmp_path / "b/EXP000/RUN000", 2, Position(2, 0))
    assert read_record(place[0] / RECORD_NAME).segments[0].lost_steps == 4
    assert (owner / RECORD_NAME).read_bytes() == before

    def assert_is_left_alone():
        found = find(here)
        assert (found.path.name, found.checkpoint) == ("RUN001", None)
        assert has_note(found, "it is running")
        found.close()

    assert len(opening.lock_descriptors) == 2
    assert_is_left_alone()
    opening.close()
    held = take_lock(owner / LOCK_NAME)
    assert_is_left_alone()
    held.release()
    flags = ["--ckpt_directory", str(tmp_path / "c"), "--run_id", "RUN000"]
    assert open_place(parameters(tmp_path / "b", *flags))[1] == (place[0], 3, Position(2, 0))


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_checkpoint_of_another_run_is_not_taken_from_a_shared_directory(tmp_path, mode):
    flags = ["--ckpt_directory", str(tmp_path / "c"), "--run_id", "mine"]
    params = parameters(tmp_path, *flags, "--ckpt_restart_mode", mode)
    mine = plant(params, tmp_path / "EXP000/mine")
    save(tmp_path / "c", tmp_path / "EXP000/other", (4, 0))
    if mode == "required":
        with pytest.raises(ParameterError, match="is not of the run in"):
            find(params)
        return
    opening, place = open_place(params)
    assert place == (mine, 2, None)
    assert has_note(opening, "is not of the run in")
    opening.close()
    save(tmp_path / "c", mine, (1, 0))
    assert open_place(params)[1] == (mine, 3, Position(1, 0))


def test_without_locks_a_run_that_may_be_alive_is_never_taken_over(tmp_path, monkeypatch):
    params, ended = (parameters(tmp_path / name) for name in ("running", "failed"))
    plant(params, tmp_path / "running/EXP000/RUN000", (1, 0), status="running")
    plant(ended, tmp_path / "failed/EXP000/RUN000", (1, 0))
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    found = find(params)
    assert found.path.name == "RUN001"
    assert has_note(found, "cannot be told")
    # A run whose record says how it ended goes on, once.
    assert find(ended).path.name == "RUN000"
    found = find(ended)
    assert found.path.name == "RUN001"
    assert has_note(found, "another process continues it")


@pytest.mark.parametrize("continues", [False, True])
def test_of_equal_commands_at_the_same_moment_each_has_a_directory(tmp_path, continues):
    """Only one of them continues the run that was there."""

    def start(_):
        barrier.wait()
        return open_place(params)

    params = parameters(tmp_path, "--ckpt_save_interval", str(int(continues)))
    if continues:
        plant(params, tmp_path / "EXP000/RUN000", (1, 0))
    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        places = [place for _, place in pool.map(start, range(8))]
    expected = [(f"RUN{i:03d}", 2 if continues and i == 0 else 1) for i in range(8)]
    assert sorted((directory.name, segment) for directory, segment, _ in places) == expected


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ParameterError, match="output_dir"):
        find(parameters(tmp_path / "file"))
