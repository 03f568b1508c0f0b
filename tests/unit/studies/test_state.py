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
from candle_p1.studies import state as state_module
from candle_p1.studies.execute import complete_record
from candle_p1.studies.plan import PlannedRun
from candle_p1.studies.state import pids_of, state_of
from tests.files.toy.toy_records import toy_record
from tests.planted_records import REMOVED, changed

TOY = str(Path(__file__).parents[2] / "files/toy")
SETTINGS = {"loader": "parallel", "epochs": 8, "rng_seed": 1, "dense": [1, 2], "dropout": None}
NO_CHECKPOINTS = {"ckpt_save_interval": 0, "ckpt_every_s": 0.0, "ckpt_every_steps": 0}
END = "candle-p1 study: the run has ended with code 1\n"
CONTINUED = "candle-p1 study: the run is continued\n"


@pytest.fixture
def run(tmp_path):
    variables = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}
    settings = SETTINGS | NO_CHECKPOINTS | {"ckpt_restart_mode": "auto"}
    return PlannedRun("plain", 0, TOY, 2, variables, {"epochs": 8}, settings, 8, 5, tmp_path)


def with_checkpoints(run, mode="auto"):
    on = {"ckpt_every_s": 60.0, "ckpt_restart_mode": mode}
    return replace(run, settings=dict(run.settings) | on)


@pytest.fixture
def write(run):
    """Writes the record of an attempt at the run."""

    def write(status="ok", attempt=1, changes=(), num_ranks=2, settings=None):
        variables = run.variables | {"OMP_OTHER": "1"} | (settings or {})
        parameters = SETTINGS | {"output_dir": "x"} | dict(changes)
        record = toy_record(parameters, num_ranks, status, settings=variables)
        run.directory(attempt).mkdir(exist_ok=True)
        write_record(run.directory(attempt) / "run.json", record)
        return record

    return write


STATUSES = ("ok", "failed", "interrupted", "running")
CHAIN = "jobs 2\nbegun\nended 138\n"


@pytest.mark.parametrize(
    ("attempts", "status", "current", "following"),
    [
        ({}, "waiting", None, 1),
        ({1: {"job.sh.failed": ""}}, "waiting", None, 1),
        ({1: {"job.sh": ""}}, "submitted", 1, 1),
        ({1: "ok"}, "ok", 1, 2),
        ({1: "running"}, "interrupted", 1, 2),
        ({1: {"running": "", "job.sh": ""}}, "running", 1, 2),  # on other machines
        ({1: {"run.json": ""}}, "interrupted", 1, 2),
        ({1: "interrupted"}, "interrupted", 1, 2),
        ({1: "interrupted", 2: "failed", 10: "ok"}, "ok", 10, 11),
        ({2: "failed", 10: {"job.sh": ""}}, "submitted", 10, 10),
        ({1: {"failed": "", "study.log": "training\n"}}, "interrupted", 1, 2),  # the study died
        ({1: {"failed": "", "study.log": f"training\n{END}"}}, "failed", 1, 2),
        ({1: {"failed": "", "study.log": f"{END}{CONTINUED}"}}, "interrupted", 1, 2),
        ({1: {"interrupted": "", "job.sh": "", "job.chain": CHAIN}}, "submitted", 1, 2),
        ({1: {"interrupted": "", "job.sh": "", "job.chain": CHAIN * 2}}, "interrupted", 1, 2),
    ],
)
def test_the_state_of_a_run_follows_from_its_directories(
    run, write, attempts, status, current, following
):
    for attempt, files in attempts.items():
        run.directory(attempt).mkdir()
        for name, text in ({files: ""} if isinstance(files, str) else files).items():
            if name in STATUSES:
                write(name, attempt)
            else:
                (run.directory(attempt) / name).write_text(text)
    state = state_of(run)
    directory = None if current is None else run.directory(current)
    assert (state.status, state.directory) == (status, directory)
    assert state.next_directory == run.directory(following)
    assert state.is_due() == (status in ("waiting", "interrupted"))
    assert state.is_due(retry_failed=True) == (status in ("waiting", "interrupted", "failed"))
    goes_on = current and status == "interrupted" and "run.json" not in attempts[1]
    again = state_of(with_checkpoints(run))
    assert again.is_continued == bool(goes_on)
    assert again.next_directory == run.directory(1 if goes_on else following)


def test_without_restarts_an_interrupted_run_begins_anew(run, write, monkeypatch):
    write("running", changes={"ckpt_restart_mode": "off", "ckpt_every_s": 60.0})
    assert state_of(with_checkpoints(run, "off")).next_directory == run.directory(2)
    monkeypatch.setattr(state_module, "pids_of", lambda directory: [1])  # it still runs
    assert (state_of(run).status, state_of(run).is_due()) == ("running", False)


@pytest.mark.parametrize("status", ["failed", "running"])
def test_unfinished_records_of_other_parameters_do_not_count(run, write, status):
    write(status, changes={"epochs": 4})
    assert (state_of(run).status, run.next_directory()) == ("waiting", run.directory(2))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"changes": {"dense": [1]}}, ["dense", "[1]", "[1, 2]"]),
        ({"num_ranks": 1}, ["num_ranks", "1", "2"]),
        ({"settings": {"OMP_NUM_THREADS": "4"}}, ["OMP_NUM_THREADS", '"4"', '"3"']),
    ],
)
def test_an_ok_record_of_another_run_is_never_overwritten(run, write, change, parts):
    write(**change)
    pattern = ".* ".join(re.escape(part) for part in (str(run.directory() / "run.json"), *parts))
    with pytest.raises(RecordError, match=pattern):
        state_of(run)


def test_checkpoints_and_added_parameters_make_no_other_run(run, write, monkeypatch):
    write(changes={"ckpt_every_s": 600.0, "ckpt_keep_limit": 2}, settings={"OMP_OTHER": "7"})
    path = run.directory() / "run.json"
    write_record(path, changed(read_record(path), {"parameters.loader": REMOVED}))

    def refuse(self, parameters):  # as a benchmark without synthetic data does
        raise ParameterError("name all files")

    monkeypatch.setattr(Benchmark, "bind", refuse)
    assert (state_of(run).status, state_of(run).total_s) == ("ok", 10)
    another = replace(run, settings=dict(run.settings) | {"loader": "of another value"})
    with pytest.raises(RecordError, match=r"loader is .* there and"):
        state_of(another)
    path.write_text("{")
    with pytest.raises(RecordError, match=r"plain-np2-r0/run\.json"):
        state_of(run)


def test_processes_are_identified_by_their_command_line(run):
    flags = run.command_flags(run.directory())
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


def complete(run, code=1, **how):
    complete_record(run, run.directory(), ["python", "x.py"], code, **how)
    return json.loads((run.directory() / "run.json").read_text())


@pytest.mark.parametrize(
    ("printed", "reason"),
    [("a\nerror: no file\nb\n", ": no file"), ("a\n  b\n\n", ": b"), ("", "")],
)
def test_a_run_that_died_without_a_record_gets_one(run, printed, reason):
    run.directory().mkdir()
    (run.directory() / "study.log").write_text(printed)
    record = complete(run)
    assert record["failure"]["reason"] == f"ended with code 1{reason}"
    assert record["command"] == ["python", "x.py"]
    assert record["parameters"]["epochs"] == {"value": 8, "origin": "study"}
    (run.directory() / "run.json").write_text("")
    complete_record(run, run.directory(), [], None)  # the study was interrupted: it is repeated
    assert not (run.directory() / "run.json").exists()


@pytest.mark.parametrize(
    ("status", "how", "after", "reason"),
    [
        ("running", {"code": -9}, "failed", "ended with code -9"),
        ("running", {"code": None}, "interrupted", "the study was interrupted"),
        ("interrupted", {"is_late": True}, "failed", "5 minutes; planted interrupted"),
        ("interrupted", {"earlier": True}, "failed", "ended with code 1"),
        ("failed", {"code": None}, "interrupted", "planted failed"),  # one rank was killed first
        ("failed", {}, "failed", "planted failed"),
        ("ok", {"is_late": True}, "ok", ""),
    ],
)
def test_a_record_says_how_its_run_ended(run, write, status, how, after, reason):
    earlier = write(status)
    record = complete(run, **{**how, **({"earlier": earlier} if "earlier" in how else {})})
    assert record["status"] == after
    assert (record.get("failure") or {"reason": ""})["reason"].endswith(reason)
