from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from candle_p1.benchmark import Benchmark
from candle_p1.errors import ParameterError, RecordError
from candle_p1.records.record import read_record, write_record
from candle_p1.studies import ending
from candle_p1.studies.cost import LAUNCH_S, Measured, cost, duration, estimate
from candle_p1.studies.ending import complete_record
from candle_p1.studies.planned import PlannedRun
from candle_p1.studies.state import pids_of, state_of
from tests.files.toy.toy_records import toy_record

TOY = str(Path(__file__).parents[2] / "files/toy")
SETTINGS = {"loader": "parallel", "epochs": 8, "rng_seed": 1, "dense": [1, 2], "dropout": None}


@pytest.fixture
def run(tmp_path):
    return PlannedRun(
        series="plain",
        repeat=0,
        benchmark=TOY,
        num_ranks=2,
        threads=3,
        environment={"NCCL_DEBUG": "INFO"},
        flags={"epochs": 8},
        settings=SETTINGS,
        epochs_per_rank=8,
        minutes=5,
        study_directory=tmp_path,
    )


@pytest.fixture
def write(run):
    """Writes the record of an attempt at the run."""

    def write(status="ok", attempt=1, changes=(), num_ranks=2, settings=None):
        variables = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "OMP_OTHER": "1"}
        directory = run.directory(attempt)
        directory.mkdir()
        record = toy_record(
            SETTINGS | {"output_dir": "x"} | dict(changes),
            num_ranks,
            status,
            settings=variables | (settings or {}),
        )
        write_record(directory / "run.json", record)
        return record

    return write


def nobody(directory):
    return []


def test_a_run_without_a_record_waits(run):
    state = state_of(run)
    assert (state.status, state.directory, state.is_due()) == ("waiting", None, True)
    run.directory().mkdir()  # a log alone
    assert state_of(run).status == "waiting"
    assert run.next_directory() == run.directory()


def test_a_run_with_an_ok_record_is_done(run, write):
    write()
    state = state_of(run)
    assert (state.status, state.directory) == ("ok", run.directory())
    assert state.record["total_s"] == 10
    assert not state.is_due(retry_failed=True)


@pytest.mark.parametrize("pids", [[], [1]])
def test_a_running_record_counts_only_while_its_processes_live(run, write, pids):
    write("running")
    state = state_of(run, lambda directory: pids)
    assert state.status == ("running" if pids else "interrupted")
    assert state.is_due() == (not pids)


def test_an_empty_record_was_claimed_and_never_written(run):
    run.directory().mkdir()
    (run.directory() / "run.json").touch()
    assert state_of(run, nobody).status == "interrupted"
    assert run.next_directory() == run.directory(2)


def test_an_interrupted_run_is_repeated_and_a_failed_one_if_asked(run, write):
    write("interrupted")
    assert state_of(run).is_due()
    write("failed", attempt=2)
    state = state_of(run)
    assert (state.status, state.directory) == ("failed", run.directory(2))
    assert not state.is_due()
    assert state.is_due(retry_failed=True)
    assert run.next_directory() == run.directory(3)
    write("ok", attempt=3)
    assert state_of(run).status == "ok"


@pytest.mark.parametrize("seen", [False, True])
def test_a_run_that_fails_as_its_study_is_killed_was_interrupted(run, write, seen):
    write("failed")
    end = "candle-p1 study: the run has ended with code 1\n" if seen else ""
    (run.directory() / "study.log").write_text(f"training\n{end}")
    assert state_of(run).status == ("failed" if seen else "interrupted")


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_unfinished_records_of_other_parameters_do_not_count(run, write, status):
    write(status, changes={"epochs": 4})
    assert state_of(run, nobody).status == "waiting"
    assert run.next_directory() == run.directory(2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"changes": {"epochs": 4}}, "epochs is 4 there and 8 here"),
        ({"changes": {"dense": [1]}}, "dense is [1] there and [1, 2] here"),
        ({"changes": {"rng_seed": 2}}, "rng_seed is 2 there and 1 here"),
        ({"num_ranks": 1}, "num_ranks is 1 there and 2 here"),
        ({"settings": {"OMP_NUM_THREADS": "4"}}, 'OMP_NUM_THREADS is "4" there and "3" here'),
        ({"settings": {"NCCL_DEBUG": "WARN"}}, 'NCCL_DEBUG is "WARN" there and "INFO" here'),
    ],
)
def test_an_ok_record_of_another_run_is_never_written_over(run, write, change, said):
    write(**change)
    with pytest.raises(RecordError) as raised:
        state_of(run)
    path = run.directory() / "run.json"
    assert str(raised.value) == (
        f"{path} is of another run than the study's: {said}. Nothing is written over: name another"
        " directory by -o, or move this one away"
    )


def test_what_the_study_does_not_set_makes_no_other_run(run, write):
    write(settings={"OMP_OTHER": "7"})
    assert state_of(run).status == "ok"


def test_a_parameter_newer_than_the_record_had_its_default(run, write):
    write()
    path = run.directory() / "run.json"
    record = read_record(path)
    newer = "loader"
    del record["parameters"][newer]
    write_record(path, record)
    assert state_of(run, nobody).status == "ok"
    another = replace(run, settings=dict(run.settings) | {newer: "of another value"})
    with pytest.raises(RecordError, match=f"{newer} is .* there and"):
        state_of(another, nobody)


def test_what_was_submitted_as_a_job_is_left_to_it(run, write):
    run.directory().mkdir()
    (run.directory() / "job.sh").touch()
    state = state_of(run, nobody)
    assert (state.status, state.is_due(retry_failed=True)) == ("submitted", False)
    run.directory().joinpath("job.sh").unlink()
    run.directory().rmdir()
    write("running")
    assert state_of(run, nobody).status == "interrupted"
    (run.directory() / "job.sh").touch()  # its processes are on other machines
    assert state_of(run, nobody).status == "running"


def test_a_record_that_cannot_be_read_is_named(run, write):
    write()
    (run.directory() / "run.json").write_text("{")
    with pytest.raises(RecordError, match=r"plain-np2-r0/run\.json"):
        state_of(run)


def test_processes_are_known_by_their_command_line(run):
    words = run.command_flags()
    assert pids_of(run.directory()) == []
    for line in (words, ["--record", str(run.directory() / "run.json")]):
        program = "print(flush=True); import time; time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", program, *line], stdout=subprocess.PIPE)
        try:
            process.stdout.readline()
            assert pids_of(run.directory()) == [process.pid]
            assert pids_of(run.directory(2)) == []
        finally:
            process.kill()
            process.communicate()


def complete(run, **how):
    how = {"code": 1, "is_late": False} | how
    complete_record(run, run.directory(), ["python", "x.py"], **how)
    return json.loads((run.directory() / "run.json").read_text())


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("a\nerror: no such file\nb\n", "ended with code 1: no such file"),
        ("a\n  b\n\n", "ended with code 1: b"),
        ("", "ended with code 1"),
    ],
)
def test_a_run_that_died_without_a_record_gets_one(run, printed, reason):
    run.directory().mkdir()
    (run.directory() / "study.log").write_text(printed)
    record = complete(run)
    assert record["failure"]["reason"] == reason
    assert record["command"] == ["python", "x.py"]
    (run.directory() / "study.log").unlink()
    state = state_of(run)
    assert (state.status, state.directory) == ("failed", run.directory())


def test_a_record_left_running_is_completed(run, write, monkeypatch):
    monkeypatch.setattr(ending, "pids_of", nobody)
    write("running")
    assert complete(run, code=-9)["failure"]["reason"] == "ended with code -9"
    assert state_of(run).status == "failed"


def test_a_run_ended_at_its_time_limit_has_failed(run, write):
    write("interrupted")
    assert complete(run, is_late=True)["failure"]["reason"] == (
        "ended at the study's time limit of 5 minutes; planted interrupted"
    )
    assert state_of(run).status == "failed"


def test_what_a_run_says_itself_stays(run, write):
    record = write("failed")
    assert complete(run) == record
    write("ok", attempt=2)
    complete_record(run, run.directory(2), [], code=0, is_late=True)
    assert state_of(run).status == "ok"


def test_an_interrupted_study_has_no_failed_run(run, write):
    write("failed")  # as one rank that is killed before the others looks
    assert complete(run, interrupted=True)["status"] == "interrupted"
    run.directory(2).mkdir()
    complete_record(run, run.directory(2), [], code=0, is_late=False, interrupted=True)
    assert not (run.directory(2) / "run.json").exists()


def known(run, *facts):
    """Returns what is known of runs: (series, ranks, epochs of each, total_s, train_s)."""
    return [
        Measured(
            replace(run, series=series, num_ranks=ranks, epochs_per_rank=epochs), total_s, train_s
        )
        for series, ranks, epochs, total_s, train_s in facts
    ]


def test_the_cost_is_the_median_of_the_same_point(run):
    facts = [("plain", 2, 8, total_s, 1.0) for total_s in (10, 40, 12)]
    found = estimate(run, known(run, *facts, ("plain", 4, 4, 99, 9)))
    assert (found.seconds, found.basis) == (LAUNCH_S + 12, "same")


def test_the_cost_is_that_of_the_nearest_point_by_its_epochs(run):
    facts = [
        ("plain", 1, 16, 30, 24),  # 6 s and 1.5 s an epoch
        ("plain", 8, 2, 99, 9),
        ("other", 2, 8, 99, 9),
    ]
    found = estimate(run, known(run, *facts))
    assert (found.seconds, found.basis) == (LAUNCH_S + 6 + 8 * 1.5, "near")
    found = estimate(run, known(run, ("other", 2, 4, 10, 4)))
    assert (found.seconds, found.basis) == (LAUNCH_S + 6 + 8, "near")


def test_the_cost_is_at_most_the_time_limit(run):
    other = replace(run, benchmark="nt3")
    assert estimate(run, known(other, ("plain", 2, 8, 10, 4))).seconds == 300
    assert estimate(run, known(run, ("plain", 2, 8, 1000, 4))).seconds == 300


def test_the_cost_in_words(run):
    facts = known(run, ("plain", 2, 8, 40, 8))
    runs = [run, replace(run, num_ranks=4), replace(run, benchmark="nt3")]
    assert cost(runs, facts).explain() == (
        "3 runs, at most 6 min: 1 by finished runs of the same point, 1 by finished runs of the"
        " nearest one, 1 by their time limit"
    )
    assert cost([run], facts).explain() == (
        f"1 run, about {LAUNCH_S + 40:.0f} s: 1 by finished runs of the same point"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1.5 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_an_attempt_that_was_tidied_away_does_not_repeat_a_run(run, write):
    write("interrupted")
    write("ok", attempt=2)
    (run.directory() / "run.json").unlink()
    run.directory().rmdir()
    assert state_of(run, nobody).status == "ok"
    assert run.next_directory() == run.directory(3)
    (run.directory(2) / "run.json").unlink()
    (run.directory(2) / "job.sh").touch()
    assert state_of(run, nobody).status == "submitted"
    assert run.next_directory() == run.directory(2)


def test_a_job_that_failed_before_its_ranks_counts_as_not_submitted(run):
    run.directory().mkdir()
    (run.directory() / "job.sh.failed").touch()
    (run.directory() / "job.12.out").touch()
    state = state_of(run, nobody)
    assert (state.status, state.is_due()) == ("waiting", True)


def test_a_benchmark_that_has_no_data_of_its_own_can_be_studied(run, write, monkeypatch):
    def refuse(self, parameters):
        raise ParameterError("name all files")

    monkeypatch.setattr(Benchmark, "bind", refuse)
    write()
    assert state_of(run, nobody).status == "ok"
