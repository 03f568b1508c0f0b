"""Studies of a benchmark that trains nothing, executed in real processes."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from candle_p1.cli import cli
from candle_p1.distributed.launch_environment import MPI_VARIABLES
from candle_p1.errors import CandleError, ParameterError, RecordError, SetupError
from candle_p1.records.record import read_record
from candle_p1.records.tables import as_cells
from candle_p1.studies import execute
from candle_p1.studies.display import render_status
from candle_p1.studies.plan import Choice, make_plan, read_plan
from candle_p1.studies.state import states_of
from candle_p1.studies.study_file import list_studies, read_study
from candle_p1.training.screen import Screen
from tests.conftest import wait_until

TOY = Path(__file__).parents[2] / "files/toy"
STUDY = f"""
title = "a study"
shows = ["Figure 0"]
benchmark = "{TOY}"
repeats = 2
minutes = 5
vary.does = ["train"]
[sizes.small]
ranks = [1]
"""


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch):
    for name in MPI_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def plan(tmp_path):
    def plan(does=("train",), flags=(), **choice):
        path = tmp_path / "mine.toml"
        path.write_text(STUDY.replace('["train"]', str(list(does))))
        return make_plan(read_study(path), Choice(flags=list(flags), **choice), tmp_path / "out")

    return plan


def perform(plan, retry_failed=False):
    states = execute.execute_study(plan, Screen(), retry_failed)
    assert states == states_of(plan.runs)
    return {state.run.name: state.status for state in states}


def study(*argv):
    result = CliRunner().invoke(cli, ["study", *map(str, argv)])
    if isinstance(result.exception, CandleError):
        raise result.exception
    return result


def test_all_runs_are_executed_in_order_and_none_is_repeated(plan, capsys, tmp_path):
    this = plan()
    assert list(perform(this).values()) == ["ok", "ok"]
    assert capsys.readouterr().out.splitlines()[:3] == [
        "2 runs, at most 10 min",
        "1/2  does-train-np1-r0  1.0 s  accuracy 0.75  (1 run, about 1 s left)",
        "2/2  does-train-np1-r1  1.0 s  accuracy 0.75",
    ]
    for run in this.runs:
        record = read_record(run.directory() / "run.json")
        assert record.parameters["rng_seed"].value == 7102 + run.repeat
        log = (run.directory() / "study.log").read_text()
        assert log == "training\ncandle-p1 study: the run has ended with code 0\n"
    assert study("show", tmp_path / "mine.toml", "-o", tmp_path / "out").output.count("# ok") == 2
    perform(plan(repeats=3))
    printed = capsys.readouterr().out
    assert "2 of 3 runs are already done" in printed
    assert ("3/3  does-train-np1-r2" in printed, "1/3" in printed) == (True, False)


def test_a_failed_run_is_skipped_and_repeated_only_on_request(plan, capsys):
    this = plan(["fail", "break", "train"], repeats=1)
    expected = {"does-fail-np1-r0": "failed", "does-break-np1-r0": "failed"}
    assert perform(this) == expected | {"does-train-np1-r0": "ok"}
    output = capsys.readouterr().out
    assert "does-fail-np1-r0  failed: planted failed" in output
    assert "does-break-np1-r0  failed: ended with code 3: broken on purpose" in output
    perform(this)
    assert "--retry_failed" in capsys.readouterr().out
    perform(this, retry_failed=True)
    assert (this.directory / "does-fail-np1-r0-attempt2/run.json").exists()
    assert not (this.directory / "does-fail-np1-r0-attempt3").exists()


@pytest.mark.extended
def test_a_run_that_takes_too_long_is_ended(plan, monkeypatch):
    monkeypatch.setattr(execute, "LAUNCH_S", 2 - 60 * 5)
    this = plan(["hang"], repeats=1)
    assert [*perform(this).values()] == ["failed"]
    record = read_record(this.runs[0].directory() / "run.json")
    assert "time limit of 5 minutes" in record.failure.reason


def test_a_study_that_cannot_be_executed_is_refused(plan, tmp_path, monkeypatch):
    this = plan()
    with execute._locked(this.directory), pytest.raises(SetupError, match="mine-small"):
        perform(this)  # as another process would
    with pytest.raises(ParameterError, match="100000 ranks"):
        perform(plan(ranks=[100000], flags=["--epochs_scaling", "weak"]))
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").touch()
    with pytest.raises(SetupError, match="mine-small"):
        perform(this)
    monkeypatch.setenv("PMIX_RANK", "0")
    with pytest.raises(ParameterError, match="launcher"):
        perform(this)


@pytest.mark.extended
def test_a_run_that_an_earlier_session_left_is_waited_for(plan, monkeypatch):
    this = plan(repeats=1)
    directory = this.runs[0].directory()
    flags = [*this.runs[0].command_flags(directory), "--does", "hang"]
    left = subprocess.Popen([sys.executable, TOY / "toy_baseline_keras2.py", *flags])
    try:
        wait_until((directory / "run.json").exists, 60, left)
        monkeypatch.setattr(execute, "GRACE_S", 0.0)
        time.sleep(0.2)
        with pytest.raises(CandleError, match=rf"kill {left.pid}"):
            perform(this)
    finally:
        left.kill()
        left.wait()


@pytest.mark.extended
def test_a_signal_ends_the_run_and_the_study_says_how_to_resume_it(plan, tmp_path, monkeypatch):
    this = plan(flags=["--toy_s", "3"])
    second = this.runs[1].directory() / "run.json"
    argv = ["run", str(tmp_path / "mine.toml"), "-o", str(tmp_path / "out"), "--toy_s", "3"]

    def kill():
        wait_until(lambda: second.exists() and second.stat().st_size, 300)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "argv", ["candle-p1", "study", *argv])
    killer = threading.Thread(target=kill)
    killer.start()
    result = study(*argv)
    killer.join()
    assert result.exit_code == 128 + signal.SIGTERM
    assert result.output.endswith(f"\n$ candle-p1 study {shlex.join(argv)}\n")
    assert [state.status for state in states_of(this.runs)] == ["ok", "interrupted"]


@pytest.mark.extended
def test_a_study_with_a_failed_run_ends_with_code_1_even_if_it_was_moved(
    plan, tmp_path, monkeypatch
):
    this = plan(["fail", "train"])
    result = study("run", tmp_path / "mine.toml", "-o", tmp_path / "out")
    assert (result.exit_code, result.output.splitlines()[0]) == (1, "mine, small: a study")
    assert result.output.endswith(f"runs took 2 s in total; records: {this.directory}\n")
    by_name = study("status", tmp_path / "mine.toml", "-o", tmp_path / "out")
    assert "2 of 4 runs are done, 2 failed" in by_name.output
    assert by_name.output == study("status", this.directory).output
    assert by_name.output in result.output
    assert read_plan(this.directory).runs == this.runs
    monkeypatch.chdir(this.directory.rename(tmp_path / "moved"))
    found = read_plan(Path())
    assert found.directory == tmp_path / "moved"
    table, *lines = render_status(found, states_of(found.runs))
    assert as_cells(table) == (
        ["point", "ok", "failed", "median total (s)"],
        [("does-fail-np1", "0", "2", ""), ("does-train-np1", "2", "0", "1.0")],
    )
    assert f"planted failed; see {tmp_path}/moved/does-fail-np1-r0/study.log" in "".join(lines)


def test_the_list_has_every_study_with_what_it_shows():
    lines = study("list").output.splitlines()
    assert [line.split(":")[0] for line in lines] == list_studies()
    assert any("Figure 10" in line for line in lines if line.startswith("batch-p1b3: "))
    runs = study("show", "strong-nt3", "--ranks", "4, 1,4").output
    assert {number for number in range(9) if f"-np{number}-" in runs} == {1, 4}


def test_a_dry_run_shows_the_plan_and_starts_nothing(plan, tmp_path):
    this = plan()
    argv = [tmp_path / "mine.toml", "-o", tmp_path / "out"]
    shown = study("show", *argv, "--color", "a b").output
    assert f"results: {this.directory}\n" in shown
    assert study("run", *argv, "--color", "a b", "--dry_run").output == shown
    assert not this.directory.exists()
    with pytest.raises(RecordError, match=r"mine-small .*study\.json"):
        study("status", *argv)
    this.directory.mkdir(parents=True)
    (this.directory / "study.json").write_text("{")
    with pytest.raises(RecordError, match=r"study\.json"):
        study("status", this.directory)
