"""Which run a command continues, and where."""

import errno
import fcntl
import re
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


def positions(words):
    """Returns the positions of words such as 2.3: epoch 2, step 3."""
    return [tuple(map(int, word.split("."))) for word in words]


EVALUATED = "--train_bool False --ckpt_directory"
REQUIRED = "--ckpt_restart_mode required"
SHARED, MINE = "--ckpt_directory {tmp}/c", "--run_id mine --ckpt_directory {tmp}/c"


@pytest.mark.parametrize(
    ("runs", "shared", "flags", "found", "note"),
    [
        # The newest of several runs with equal parameters is taken.
        (
            "RUN000 1.0; RUN001 1.0; RUN002; RUN003=ok 1.0",
            "",
            "",
            "RUN001 2 1.0",
            "it has finished",
        ),
        ("RUN000 1.0; RUN001=--epochs=8 1.0", "", "", "RUN000 2 1.0", "RUN001 is not continued"),
        ("RUN000 1.0; RUN001=--epochs=8 1.0; RUN002", "", "--epochs 8", "RUN001 2 1.0", ""),
        # Only what decides about results must be equal.
        ("RUN000 1.0", "", "--loader chunked --timeout 60 --eval_bool False", "RUN000 2 1.0", ""),
        ("RUN000 1.0", "", "--ckpt_every_s 30 --verbose True", "RUN000 2 1.0", ""),
        ("RUN000 1.0", "", "--rng_seed 1", "RUN001 1", ""),
        ("RUN000 1.0", "", "--ckpt_restart_mode off", "RUN001 1", ""),
        ("RUN000 1.0", "", "--ckpt_save_interval 0", "RUN001 1", ""),
        # Without training, a checkpoint is evaluated in a run of its own.
        ("RUN000 1.0", "", "--train_bool False", r"train_bool False .* no checkpoint", ""),
        ("RUN000 1.0", "", f"{EVALUATED} {{tmp}}", r"train_bool False .* no checkpoint", ""),
        ("RUN000 1.0 2.0", "", f"{EVALUATED} {{tmp}}/EXP000/RUN000/ckpts", "RUN001 1 2.0", ""),
        ("RUN000 1.0", "", "--train_bool False --eval_bool False", "RUN000 2 1.0", ""),
        # What is required, or in a directory that the user has chosen, goes on or says why not.
        ("", "", REQUIRED, "no checkpoint to continue from", ""),
        ("RUN000", "", REQUIRED, "RUN000 is not continued: it has no checkpoint", ""),
        ("RUN000 1.0", "", REQUIRED, "RUN000 2 1.0", ""),
        ("JOB000", "", "--run_id JOB000", "JOB000 2", ""),
        ("JOB000 1.0", "", "--run_id JOB000", "JOB000 2 1.0", ""),
        ("x", "", "--run_id x --epochs 8", "the run has epochs = 4, this run epochs = 8", ""),
        ("x", "", "--run_id x --ckpt_restart_mode off", "the record of a run: choose", ""),
        # Checkpoints in a named directory say which run goes on; those of another are not taken.
        ("RUN000; RUN001", "RUN000 2.0; RUN001 1.0; RUN000 3.0", SHARED, "RUN000 2 3.0", ""),
        ("mine", "other 4.0", MINE, "mine 2", "is not of the run in"),
        ("mine", "other 4.0", f"{MINE} {REQUIRED}", "is not of the run in", ""),
        ("mine", "other 4.0; mine 1.0", MINE, "mine 2 1.0", ""),
    ],
)
def test_which_run_goes_on_and_from_where(tmp_path, runs, shared, flags, found, note):
    """A run is its name, =ok or =FLAG if it is not like the others, and what it has saved."""
    for name, *saved in map(str.split, filter(None, runs.split(";"))):
        name, _, other = name.partition("=")
        given = parameters(tmp_path, *([other] if other.startswith("-") else []))
        status = other if other == "ok" else "failed"
        plant(given, tmp_path / "EXP000" / name, *positions(saved), status=status)
    for name, *saved in map(str.split, filter(None, shared.split(";"))):
        save(tmp_path / "c", tmp_path / "EXP000" / name, *positions(saved))
    params = parameters(tmp_path, *flags.format(tmp=tmp_path).split())
    before = {path: path.read_bytes() for path in tmp_path.glob("EXP000/*/run.json")}
    name, _, rest = found.partition(" ")
    if not re.fullmatch(r"\d( \d\.\d)?", rest):
        with pytest.raises(ParameterError, match=found):
            find(params)
        for directory in tmp_path.glob("EXP000/*"):
            take_lock(directory / LOCK_NAME).release()  # it is free
        return
    opening, (directory, segment, position) = open_place(params)
    assert (directory.name, segment) == (name, int(rest.split()[0]))
    assert position == next((Position(*each) for each in positions(rest.split()[1:])), None)
    assert has_note(opening, note) or not note
    changed = [path.parent for path, text in before.items() if path.read_bytes() != text]
    assert changed == [directory] * (segment > 1)
    if segment > 1:
        first, *_ = read_record(directory / RECORD_NAME).segments
        assert first.lost_steps == (4 if position else 9)


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
    assert "segment 2" in opening.notes[-1]
    # Another start of the command finds the run alive, and begins one of its own.
    assert open_place(params)[1] == (tmp_path / "EXP000/RUN001", 1, None)
    opening.close()
    assert open_place(params)[1][0] == first


def test_a_directory_that_the_user_has_chosen_is_never_used_twice_at_once(tmp_path):
    params = parameters(tmp_path, "--experiment_id", ".", "--run_id", "x")
    (directory,) = run_directory.run_directories("nt3", params)
    plant(params, directory)
    opening, place = open_place(params)
    assert place == (directory, 2, None)
    with pytest.raises(ParameterError, match="it is running"):
        find(params)
    opening.close()
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
