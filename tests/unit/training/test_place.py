"""Which run a command continues, and where."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.checkpoints.manifest import Position
from candle_p1.checkpoints.source import ArrayInMemory
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
from candle_p1.records.types import Failure
from candle_p1.training import place as place_module
from candle_p1.training.opening import RunOpening
from candle_p1.training.place import find_place
from candle_p1.training.run_lock import LOCK_NAME, take_lock
from tests.planted_records import planted_record

NT3 = find_benchmark("nt3")
FLAGS = ["--ckpt_save_interval", "1", "--epochs", "4"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    for name in ("FAREWELL_S", "NOTICE_S"):
        monkeypatch.setattr(place_module, name, 0.0)


class Watchdog:
    """In place of the client: takes note of the record."""

    def report_record(self, record):
        self.record = record


def parameters(tmp_path, *flags):
    return NT3.read_parameters([*FLAGS, "--output_dir", str(tmp_path), *flags])


def record_of(params, **facts):
    return make_record({
        "schema_version": 2, "status": "running", "benchmark": "nt3", "started": utc_now(),
        "num_ranks": 2,
        "parameters": {
            name: {"value": value, "origin": str(params.origin(name))}
            for name, value in params.items()
        },
    } | facts)  # fmt: skip


def save(root, directory, *positions, part=1, steps=5):
    """Saves checkpoints as a run in a directory does."""
    writer = CheckpointWriter(SerialCommunicator(), root)
    facts = {"run": {"directory": str(directory), "part": part, "steps": steps}}
    arrays = {"weights/a": ArrayInMemory(np.arange(6, dtype=np.float32))}
    for position in positions:
        writer.save(Position(*position), arrays, {}, facts, wait=True)
    writer.close()


def plant(params, directory, *, status="failed", saved=((1, 0),), steps=9, locked=True):
    """Leaves a directory as a run does that has ended with a status; returns it."""
    directory.mkdir(parents=True)
    if locked:
        take_lock(directory).release()
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


def open_place(params, **facts):
    """Opens a run as lifecycle does; returns what opened it, and the directory."""
    opening = RunOpening("nt3", params)
    opening.find()
    directory, part = opening.open(record_of(params, **facts), Watchdog())
    return opening, directory, part


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_the_same_command_goes_on_in_the_same_directory_and_record(tmp_path, status):
    params = parameters(tmp_path)
    first = plant(params, tmp_path / "EXP000/RUN000", status=status, saved=((1, 0), (2, 3)))
    opening, directory, part = open_place(params, num_ranks=4)
    assert (directory, part) == (first, 2)
    assert opening.restart.position == Position(2, 3)
    record = read_record(first / RECORD_NAME)
    assert (record.status, record.num_ranks) == ("running", 4)
    assert record.parts[0].lost_steps == (None if status == "running" else 4)
    assert record.parts[1].checkpoint == str(opening.restart.directory)
    assert (first / f".{RECORD_NAME}.reserved").exists()
    assert any("part 2" in note for note in opening.notes)
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
    assert open_place(params)[1] == expected
    assert open_place(other)[1] == experiment / "RUN004"


@pytest.mark.parametrize(
    ("flags", "goes_on"),
    [
        (["--ckpt_every_s", "30", "--loader", "chunked", "--verbose", "True"], True),
        (["--timeout", "60", "--eval_bool", "False"], True),
        (["--rng_seed", "1"], False),
        (["--learning_rate", "0.5"], False),
        (["--ckpt_restart_mode", "off"], False),
        (["--ckpt_save_interval", "0"], False),
    ],
)
def test_only_what_decides_about_results_must_be_equal(tmp_path, flags, goes_on):
    plant(parameters(tmp_path), tmp_path / "EXP000/RUN000")
    directory = open_place(parameters(tmp_path, *flags))[1]
    assert (directory.name == "RUN000") == goes_on


def test_a_finished_run_is_not_continued_and_the_user_is_told(tmp_path):
    params = parameters(tmp_path)
    plant(params, tmp_path / "EXP000/RUN000", status="ok")
    place = find_place("nt3", params)
    assert place.directory.name == "RUN001"
    assert any("it has finished" in note for note in place.notes)


def test_without_training_a_checkpoint_is_evaluated_in_a_run_of_its_own(tmp_path):
    first = plant(parameters(tmp_path), tmp_path / "EXP000/RUN000", saved=((1, 0), (2, 0)))
    untrained = ["--train_bool", "False"]
    for wrong in ([], ["--ckpt_directory", str(tmp_path)]):
        with pytest.raises(ParameterError, match=r"train_bool False .* no checkpoint"):
            find_place("nt3", parameters(tmp_path, *untrained, *wrong))
    named = parameters(tmp_path, *untrained, "--ckpt_directory", str(first / "ckpts"))
    opening, directory, _ = open_place(named)
    assert (directory.name, opening.restart.position) == ("RUN001", Position(2, 0))
    assert read_record(first / RECORD_NAME).status == "failed"
    assert find_place("nt3", parameters(tmp_path, *untrained, "--eval_bool", "False"))


@pytest.mark.parametrize(
    "flags", [["--run_id", "JOB000"], ["--experiment_id", ".", "--run_id", "x"]]
)
def test_in_a_directory_that_the_user_has_chosen_a_run_goes_on_or_says_why_not(tmp_path, flags):
    params = parameters(tmp_path, *flags)
    directory = place_module.run_directories("nt3", params)[0]
    plant(params, directory)
    opening, found, part = open_place(params)
    assert (found, part, opening.restart is None) == (directory, 2, False)
    with pytest.raises(ParameterError, match="it is running"):
        find_place("nt3", params)
    opening.close()
    with pytest.raises(ParameterError, match="epochs is 4 there and 8 here"):
        find_place("nt3", parameters(tmp_path, *flags, "--epochs", "8"))
    with pytest.raises(ParameterError, match="already holds the record of a run: choose"):
        find_place("nt3", parameters(tmp_path, *flags, "--ckpt_restart_mode", "off"))


def test_without_a_checkpoint_a_run_of_a_chosen_directory_begins_again(tmp_path):
    params = parameters(tmp_path, "--run_id", "JOB000")
    plant(params, tmp_path / "EXP000/JOB000", saved=())
    opening, directory, part = open_place(params)
    assert (part, opening.restart) == (2, None)
    parts = read_record(directory / RECORD_NAME).parts
    assert (parts[0].lost_steps, parts[1].checkpoint) == (9, None)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path):
    params = parameters(tmp_path)
    directory = plant(params, tmp_path / "EXP000/RUN000", saved=((1, 0), (2, 0)))
    (newest,) = directory.glob("ckpts/epoch-0002*/arrays*")
    newest.write_bytes(newest.read_bytes()[:-1])
    opening, found, _ = open_place(params)
    assert (found, opening.restart.position) == (directory, Position(1, 0))
    assert any(str(newest) in note for note in opening.notes)


@pytest.mark.parametrize("link", ["latest", "best"])
def test_a_link_to_a_checkpoint_that_is_missing_does_not_end_the_restart(tmp_path, link):
    params = parameters(tmp_path)
    directory = plant(params, tmp_path / "EXP000/RUN000")
    (directory / "ckpts" / link).unlink(missing_ok=True)
    (directory / "ckpts" / link).symlink_to("epoch-0009")
    place = find_place("nt3", params)
    assert (place.directory, place.restart.position) == (directory, Position(1, 0))


def test_required_without_a_checkpoint_is_an_error_and_leaves_nothing_locked(tmp_path):
    params = parameters(tmp_path, "--ckpt_restart_mode", "required")
    with pytest.raises(ParameterError, match="no checkpoint to continue from"):
        find_place("nt3", params)
    plant(params, tmp_path / "EXP000/RUN000", saved=())
    with pytest.raises(ParameterError, match="RUN000 is not continued: it has no checkpoint"):
        find_place("nt3", params)
    save(tmp_path / "EXP000/RUN000/ckpts", tmp_path / "EXP000/RUN000", (1, 0))
    assert find_place("nt3", params).continued


def test_checkpoints_in_a_named_directory_say_which_run_goes_on(tmp_path):
    params = parameters(tmp_path, "--ckpt_directory", str(tmp_path / "c"))
    first = plant(params, tmp_path / "EXP000/RUN000", saved=())
    second = plant(params, tmp_path / "EXP000/RUN001", saved=())
    save(tmp_path / "c", first, (2, 0))
    save(tmp_path / "c", second, (1, 0))
    save(tmp_path / "c", first, (3, 0))
    opening, directory, _ = open_place(params)
    assert (directory, opening.restart.position) == (first, Position(3, 0))


def test_a_run_of_another_directory_goes_on_in_a_new_one_with_its_parts(tmp_path):
    params = parameters(tmp_path / "a", "--ckpt_directory", str(tmp_path / "c"))
    owner = plant(params, tmp_path / "a/EXP000/RUN000", saved=())
    save(tmp_path / "c", owner, (2, 0))
    before = (owner / RECORD_NAME).read_bytes()
    here = parameters(tmp_path / "b", "--ckpt_directory", str(tmp_path / "c"))
    opening, directory, part = open_place(here)
    assert (directory, part) == (tmp_path / "b/EXP000/RUN000", 2)
    assert opening.restart.position == Position(2, 0)
    assert read_record(directory / RECORD_NAME).parts[0].lost_steps == 4
    # An equal command does not continue it once more while it lives.
    second = find_place("nt3", here)
    assert (second.directory.name, second.restart) == ("RUN001", None)
    assert any("it is running" in note for note in second.notes)
    second.release()
    assert len(opening.kept_open) == 2
    assert (owner / RECORD_NAME).read_bytes() == before
    opening.close()
    held = take_lock(owner)
    place = find_place("nt3", here)
    assert place.restart is None
    assert any("it is running" in note for note in place.notes)
    held.release()
    fixed = parameters(
        tmp_path / "b", "--ckpt_directory", str(tmp_path / "c"), "--run_id", "RUN000"
    )
    place.release()
    opening, found, part = open_place(fixed)
    assert (found, part, opening.restart.position) == (directory, 3, Position(2, 0))


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_checkpoint_of_another_run_is_not_taken_from_a_shared_directory(tmp_path, mode):
    shared = ["--ckpt_directory", str(tmp_path / "c")]
    shared += ["--run_id", "mine", "--ckpt_restart_mode", mode]
    params = parameters(tmp_path, *shared)
    mine = plant(params, tmp_path / "EXP000/mine", saved=())
    save(tmp_path / "c", tmp_path / "EXP000/other", (4, 0))
    if mode == "required":
        with pytest.raises(ParameterError, match="is not of the run in"):
            find_place("nt3", params)
        return
    opening, found, part = open_place(params)
    assert (found, part, opening.restart) == (mine, 2, None)
    assert any("is not of the run in" in note for note in opening.notes)
    opening.close()
    save(tmp_path / "c", mine, (1, 0))
    opening, found, part = open_place(params)
    assert (found, part, opening.restart.position) == (mine, 3, Position(1, 0))


def refuse_locks(descriptor, operation):
    raise OSError(errno.ENOSYS, "no locks")


def test_without_locks_a_run_that_may_be_alive_is_never_taken_over(tmp_path, monkeypatch):
    params = parameters(tmp_path)
    plant(params, tmp_path / "EXP000/RUN000", status="running")
    ended = plant(parameters(tmp_path, "--rng_seed", "1"), tmp_path / "EXP000/RUN001")
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    place = find_place("nt3", params)
    assert place.directory.name == "RUN002"
    # A run whose record says how it ended goes on, once.
    again = parameters(tmp_path, "--rng_seed", "1")
    assert find_place("nt3", again).directory == ended
    place = find_place("nt3", again)
    assert place.directory.name == "RUN002"
    assert any("another process continues it" in note for note in place.notes)


def test_a_record_that_says_running_without_a_lock_is_left_alone(tmp_path):
    params = parameters(tmp_path)
    plant(params, tmp_path / "EXP000/RUN000", status="running", locked=False)
    place = find_place("nt3", params)
    assert place.directory.name == "RUN001"
    assert any("cannot be told" in note for note in place.notes)


START = """
import sys
from candle_p1.training import place
from tests.unit.training.test_place import open_place, parameters
from pathlib import Path
place.FAREWELL_S = place.NOTICE_S = 0.0
params = parameters(Path(sys.argv[1]))
sys.stdin.readline()
opening, directory, part = open_place(params)
print(directory.name, part, flush=True)
sys.stdin.readline()
"""


@pytest.mark.extended
def test_of_equal_commands_that_start_at_the_same_moment_one_continues_the_run(tmp_path):
    plant(parameters(tmp_path), tmp_path / "EXP000/RUN000")
    repository = Path(__file__).parents[3]
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(tmp_path)],
            cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for command in commands:
        command.stdin.write("go\n")
        command.stdin.flush()
    found = sorted(command.stdout.readline().split() for command in commands)
    for command in commands:
        command.communicate("end\n", timeout=60)
    assert found == [["RUN000", "2"], ["RUN001", "1"], ["RUN002", "1"]]


def test_numbers_of_new_runs_are_given_once(tmp_path):
    params = parameters(tmp_path, "--ckpt_save_interval", "0")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(open_place(params)[1].name)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"RUN{number:03d}" for number in range(8)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ParameterError, match="output_dir"):
        find_place("nt3", parameters(tmp_path))


def test_the_lock_file_is_hidden():
    assert LOCK_NAME.startswith(".")
