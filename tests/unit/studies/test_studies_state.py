from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from candle_p1.benchmark import Benchmark
from candle_p1.errors import ParameterError, RecordError
from candle_p1.records.record import read_record, write_record
from candle_p1.studies import run_state
from candle_p1.studies.cost import LAUNCH_S, duration, estimate, explain, remaining
from candle_p1.studies.local_run import complete_record
from candle_p1.studies.planned_run import PlannedRun
from candle_p1.studies.run_state import RunState, pids_of, state_of
from tests.files.toy.toy_records import toy_record
from tests.planted_records import REMOVED, changed

TOY = str(Path(__file__).parents[2] / "files/toy")
SETTINGS = {"loader": "parallel", "epochs": 8, "rng_seed": 1, "dense": [1, 2], "dropout": None}
NO_CHECKPOINTS = {
    **{"ckpt_save_interval": 0, "ckpt_every_s": 0.0, "ckpt_every_steps": 0},
    "ckpt_restart_mode": "auto",
}


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
        settings=SETTINGS | NO_CHECKPOINTS,
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


def test_a_run_without_a_record_waits(run):
    state = state_of(run)
    assert (state.status, state.directory, state.is_due()) == ("waiting", None, True)
    run.directory().mkdir()
    (run.directory() / "study.log").touch()
    (run.directory() / "job.sh.failed").touch()  # a job that failed before its ranks started
    assert state_of(run).status == "waiting"
    assert run.next_directory() == run.directory()


def test_a_run_with_a_record_that_is_ok_is_done(run, write):
    write(settings={"OMP_OTHER": "7"})  # which the study does not set
    state = state_of(run)
    assert (state.status, state.directory) == ("ok", run.directory())
    assert (state.total_s, state.train_s, state.quality) == (10, 8, {"accuracy": 0.75})
    assert not state.is_due(retry_failed=True)


@pytest.mark.parametrize("pids", [[], [1]])
def test_a_running_record_counts_only_while_its_processes_are_alive(run, write, pids, monkeypatch):
    monkeypatch.setattr(run_state, "pids_of", lambda directory: pids)
    write("running")
    state = state_of(run)
    assert state.status == ("running" if pids else "interrupted")
    assert state.is_due() == (not pids)


def test_a_run_with_an_empty_record_was_interrupted(run):
    run.directory().mkdir()
    (run.directory() / "run.json").touch()
    assert state_of(run).status == "interrupted"
    assert run.next_directory() == run.directory(2)


def test_an_interrupted_run_is_repeated_and_a_failed_one_only_on_request(run, write):
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
def test_a_run_that_failed_when_its_study_was_killed_counts_as_interrupted(run, write, seen):
    write("failed")
    end = "candle-p1 study: the run has ended with code 1\n" if seen else ""
    (run.directory() / "study.log").write_text(f"training\n{end}")
    assert state_of(run).status == ("failed" if seen else "interrupted")


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_unfinished_records_of_other_parameters_do_not_count(run, write, status):
    write(status, changes={"epochs": 4})
    assert state_of(run).status == "waiting"
    assert run.next_directory() == run.directory(2)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"changes": {"epochs": 4}}, ["epochs", "4", "8"]),
        ({"changes": {"dense": [1]}}, ["dense", "[1]", "[1, 2]"]),
        ({"changes": {"rng_seed": 2}}, ["rng_seed", "2", "1"]),
        ({"num_ranks": 1}, ["num_ranks", "1", "2"]),
        ({"settings": {"OMP_NUM_THREADS": "4"}}, ["OMP_NUM_THREADS", '"4"', '"3"']),
        ({"settings": {"NCCL_DEBUG": "WARN"}}, ["NCCL_DEBUG", '"WARN"', '"INFO"']),
    ],
)
def test_an_ok_record_of_another_run_is_never_overwritten(run, write, change, parts):
    write(**change)
    pattern = ".* ".join(re.escape(part) for part in (str(run.directory() / "run.json"), *parts))
    with pytest.raises(RecordError, match=pattern):
        state_of(run)


def test_checkpoints_make_no_other_run(run, write):
    """A chain of jobs adds flags for them."""
    write(changes={"ckpt_every_s": 600.0, "ckpt_save_best": False, "ckpt_keep_limit": 2})
    assert state_of(run).status == "ok"


def test_a_parameter_that_a_record_lacks_had_its_default(run, write):
    write()
    path = run.directory() / "run.json"
    newer = "loader"
    write_record(path, changed(read_record(path), {f"parameters.{newer}": REMOVED}))
    assert state_of(run).status == "ok"
    another = replace(run, settings=dict(run.settings) | {newer: "of another value"})
    with pytest.raises(RecordError, match=f"{newer} is .* there and"):
        state_of(another)


def test_a_run_that_was_submitted_as_a_job_is_left_to_its_scheduler(run, write):
    run.directory().mkdir()
    (run.directory() / "job.sh").touch()
    state = state_of(run)
    assert (state.status, state.is_due(retry_failed=True)) == ("submitted", False)
    run.directory().joinpath("job.sh").unlink()
    run.directory().rmdir()
    write("running")
    assert state_of(run).status == "interrupted"
    (run.directory() / "job.sh").touch()  # its processes are on other machines
    assert state_of(run).status == "running"


def test_a_record_that_cannot_be_read_is_named(run, write):
    write()
    (run.directory() / "run.json").write_text("{")
    with pytest.raises(RecordError, match=r"plain-np2-r0/run\.json"):
        state_of(run)


def test_processes_are_identified_by_their_command_line(run):
    flags = run.command_flags()
    assert pids_of(run.directory()) == []
    for argv in (flags, ["--record", str(run.directory() / "run.json")]):
        program = "print(flush=True); import time; time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", program, *argv], stdout=subprocess.PIPE)
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


@pytest.mark.parametrize(
    ("status", "how", "reason"),
    [
        ("running", {"code": -9}, "ended with code -9"),
        (
            "interrupted",
            {"is_late": True},
            "ended at the study's time limit of 5 minutes; planted interrupted",
        ),
    ],
)
def test_a_record_without_a_final_status_is_completed(run, write, status, how, reason):
    write(status)
    assert complete(run, **how)["failure"]["reason"] == reason
    assert state_of(run).status == "failed"


def test_a_record_that_its_run_has_completed_is_not_changed(run, write):
    write("failed")
    before = json.loads((run.directory() / "run.json").read_text())
    assert complete(run) == before
    write("ok", attempt=2)
    complete_record(run, run.directory(2), [], code=0, is_late=True)
    assert state_of(run).status == "ok"


def test_the_current_run_of_an_interrupted_study_counts_as_interrupted(run, write):
    write("failed")  # as if one rank had been killed before the others
    assert complete(run, interrupted=True)["status"] == "interrupted"
    run.directory(2).mkdir()
    complete_record(run, run.directory(2), [], code=0, is_late=False, interrupted=True)
    assert not (run.directory(2) / "run.json").exists()


def finished(run, *facts):
    """Returns finished runs: (series, ranks, epochs of each, total_s, train_s)."""
    return [
        RunState(
            replace(run, series=series, num_ranks=ranks, epochs_per_rank=epochs),
            "ok",
            record=toy_record(SETTINGS, ranks, "ok", total_s, train_s),
        )
        for series, ranks, epochs, total_s, train_s in facts
    ]


SAME_POINT = [("plain", 2, 8, total_s, 1.0) for total_s in (10, 40, 12)]
FARTHER = [("plain", 8, 2, 99, 9), ("other", 2, 8, 99, 9)]


@pytest.mark.parametrize(
    ("facts", "seconds", "basis"),
    [
        ([*SAME_POINT, *FARTHER], LAUNCH_S + 12, "same"),
        ([("plain", 1, 16, 30, 24), *FARTHER], LAUNCH_S + 6 + 8 * 1.5, "near"),
        ([("other", 2, 4, 10, 4)], LAUNCH_S + 6 + 8, "near"),
        ([("plain", 2, 8, 1000, 4)], 300, "same"),
        ([], 300, "limit"),
    ],
)
def test_the_cost_of_a_run_is_estimated_from_the_same_or_the_nearest_point(
    run, facts, seconds, basis
):
    others = finished(replace(run, benchmark="nt3"), ("plain", 2, 8, 10, 4))
    found = estimate(run, [*others, *finished(run, *facts)])
    assert (found.seconds, found.basis) == (seconds, basis)


def test_the_cost_is_explained_as_text(run):
    states = finished(run, ("plain", 2, 8, 40, 8))
    runs = [run, replace(run, num_ranks=4), replace(run, benchmark="nt3")]
    several = [estimate(each, states) for each in runs]
    text = explain(several)
    assert text.startswith("3 runs, at most 6 min: 1 ")
    assert text.count(", 1 from") == 2
    assert explain(several[:1]).startswith(f"1 run, about {LAUNCH_S + 40:.0f} s: 1 ")
    assert remaining(several, 1000.0) == "at most 6 min"
    assert remaining(several[:1], 10.0) == f"about {LAUNCH_S + 30:.0f} s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1.5 h")],
)
def test_durations_are_shown_as_text(seconds, text):
    assert duration(seconds) == text


def test_removing_an_attempt_does_not_repeat_a_run(run, write):
    write("interrupted")
    write("ok", attempt=2)
    (run.directory() / "run.json").unlink()
    run.directory().rmdir()
    assert state_of(run).status == "ok"
    assert run.next_directory() == run.directory(3)
    (run.directory(2) / "run.json").unlink()
    (run.directory(2) / "job.sh").touch()
    assert state_of(run).status == "submitted"
    assert run.next_directory() == run.directory(2)


def test_a_benchmark_without_synthetic_data_can_be_studied(run, write, monkeypatch):
    def refuse(self, parameters):
        raise ParameterError("name all files")

    monkeypatch.setattr(Benchmark, "bind", refuse)
    write()
    assert state_of(run).status == "ok"


def with_checkpoints(run, mode="auto"):
    on = {"ckpt_every_s": 60.0, "ckpt_restart_mode": mode}
    return replace(run, settings=dict(run.settings) | on)


@pytest.mark.parametrize("status", ["interrupted", "running"])
def test_an_interrupted_run_with_checkpoints_goes_on_in_its_directory(run, write, status):
    on = with_checkpoints(run)
    write(status, changes={"ckpt_every_s": 60.0})
    state = state_of(on)
    assert (state.is_due(), state.is_continued) == (True, True)
    assert state.next_directory == run.directory()


@pytest.mark.parametrize("status", ["failed", "ok"])
def test_only_interrupted_runs_go_on(run, write, status):
    write(status, changes={"ckpt_every_s": 60.0})
    assert state_of(with_checkpoints(run)).next_directory == run.directory(2)


def test_without_checkpoints_an_interrupted_run_begins_anew(run, write):
    write("interrupted", changes={"ckpt_restart_mode": "off", "ckpt_every_s": 60.0})
    state = state_of(with_checkpoints(run, "off"))
    assert (state.is_due(), state.next_directory) == (True, run.directory(2))


def test_a_record_that_is_empty_holds_nothing_to_go_on_from(run):
    run.directory().mkdir()
    (run.directory() / "run.json").touch()
    assert state_of(with_checkpoints(run)).next_directory == run.directory(2)


@pytest.mark.parametrize(
    ("after", "status"),
    [
        ("", "failed"),
        ("candle-p1 study: the run is continued\ntraining\n", "interrupted"),
        (
            "candle-p1 study: the run is continued\ncandle-p1 study: the run has ended with code"
            " 1\n",
            "failed",
        ),
    ],
)
def test_the_last_part_of_the_log_says_whether_the_study_was_killed(run, write, after, status):
    write("failed")
    end = "candle-p1 study: the run has ended with code 143\n"
    (run.directory() / "study.log").write_text(f"training\n{end}{after}")
    assert state_of(run).status == status


def test_a_run_is_left_to_the_jobs_of_its_chain(run, write):
    on = with_checkpoints(run)
    write("interrupted", changes={"ckpt_every_s": 60.0})
    chain = run.directory() / "job.chain"
    (run.directory() / "job.sh").touch()
    chain.write_text("jobs 2\nbegun\nended 138\n")
    state = state_of(on)
    assert (state.status, state.directory) == ("submitted", run.directory())
    assert not state.is_due(retry_failed=True)
    chain.rename(run.directory() / "kept")  # as told once the jobs have been cancelled
    (run.directory() / "job.sh").unlink()
    assert state_of(on).is_continued
    (run.directory() / "kept").rename(chain)
    chain.write_text("jobs 2\nbegun\nended 138\nbegun\nended 138\n")
    state = state_of(on)
    assert (state.status, state.next_directory) == ("interrupted", run.directory())


def test_a_run_that_cannot_be_continued_has_failed(run, write):
    earlier = write("interrupted")
    (run.directory() / "study.log").write_text("error: other parameters\n")
    record = complete(run, code=2, earlier=earlier)
    assert (record["status"], record["failure"]["reason"]) == (
        "failed",
        "ended with code 2: other parameters",
    )
