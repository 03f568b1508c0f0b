"""What studies consist of and how they are executed: tests/files/studies, and what takes time."""

import os
import re
import shlex
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
from candle_p1.errors import CandleError, SetupError
from candle_p1.records.record import read_record
from candle_p1.studies import execute
from candle_p1.studies.plan import Choice, make_plan, read_plan
from candle_p1.studies.state import states_of
from candle_p1.studies.study_file import find_study, list_studies
from candle_p1.training.screen import Screen
from tests.conftest import ROOT, wait_until
from tests.transcripts import Transcripts

FILES = ROOT / "tests/files/studies"
STUDIES = Transcripts(FILES)


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch):
    for name in MPI_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", STUDIES.cases)
def test_studies(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ROOT", str(ROOT))
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "data"))
    STUDIES.check(name, tmp_path, monkeypatch)


@pytest.fixture
def plan(tmp_path):
    """Plans runs of does.toml that do something: train, or hang."""

    def plan(does, repeats=1, **flags):
        text = (FILES / "does.toml").read_text().replace('"train"', f'"{does}"')
        text = text.replace("../toy", str(ROOT / "tests/files/toy"))
        (tmp_path / "does.toml").write_text(text)
        words = [f"--{name}={value}" for name, value in flags.items()]
        choice = Choice(repeats=repeats, flags=words)
        return make_plan(find_study(str(tmp_path / "does.toml")), choice, tmp_path / "out")

    return plan


def test_a_run_that_takes_too_long_is_ended(plan, monkeypatch):
    monkeypatch.setattr(execute, "LAUNCH_S", 2 - 60 * 5)
    (state,) = execute.execute_study(plan("hang"), Screen())
    assert state.status == "failed"
    record = read_record(state.directory / "run.json")
    assert "time limit of 5 minutes" in record.failure.reason


def test_another_process_does_not_work_on_the_same_study(plan):
    this = plan("train")
    with execute._locked(this.directory), pytest.raises(SetupError, match="does-small"):
        execute.execute_study(this, Screen())


def test_a_run_that_an_earlier_session_left_is_waited_for(plan, monkeypatch):
    this = plan("hang")
    directory = this.runs[0].directory()
    flags = this.runs[0].command_flags(directory)
    left = subprocess.Popen([sys.executable, FILES.parent / "toy/toy_baseline_keras2.py", *flags])
    try:
        wait_until((directory / "run.json").exists, 60, left)
        monkeypatch.setattr(execute, "GRACE_S", 0.0)
        time.sleep(0.2)
        with pytest.raises(CandleError, match=rf"kill {left.pid}"):
            execute.execute_study(this, Screen())
    finally:
        left.kill()
        left.wait()


def test_a_signal_ends_the_run_and_the_study_says_how_to_resume_it(plan, tmp_path, monkeypatch):
    this = plan("train", 2, toy_s=3)
    second = this.runs[1].directory() / "run.json"
    argv = ["run", str(tmp_path / "does.toml"), "-o", str(tmp_path / "out"), "--toy_s", "3"]

    def kill():
        wait_until(lambda: second.exists() and second.stat().st_size, 300)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "argv", ["candle-p1", "study", *argv])
    killer = threading.Thread(target=kill)
    killer.start()
    result = CliRunner().invoke(cli, ["study", *argv])
    killer.join()
    assert result.exit_code == 128 + signal.SIGTERM
    assert result.output.endswith(f"\n$ candle-p1 study {shlex.join(argv)}\n")
    assert [state.status for state in states_of(this.runs)] == ["ok", "interrupted"]


def test_a_plan_is_read_again_and_its_order_depends_on_the_seed_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = find_study(str(FILES / "colors.toml"))
    in_order, other, fewer, more = (
        make_plan(study, Choice(**choice), tmp_path)
        for choice in ({}, {"seed": 1}, {"ranks": [2]}, {"repeats": 5})
    )
    names = [run.name for run in in_order.runs]
    assert names != [run.name for run in other.runs] != sorted(names)
    assert [run.name for run in fewer.runs] == [name for name in names if "-np2-" in name]
    assert [run.name for run in more.runs][:24] == names
    in_order.write_manifest()
    assert read_plan(in_order.directory).runs == in_order.runs
    monkeypatch.chdir(in_order.directory.rename(tmp_path / "moved"))
    (first, *_), (again, *_) = in_order.runs, read_plan(Path()).runs
    assert again.directory() == tmp_path / "moved" / first.directory().name


READY = [(name, size) for name in list_studies() for size in find_study(name).sizes]


@pytest.mark.parametrize(("name", "size"), READY)
def test_every_ready_made_study_expands(name, size, tmp_path):
    study = find_study(name)
    runs = make_plan(study, Choice(size=size), tmp_path).runs
    assert study.shows
    assert len({run.name for run in runs}) == len(runs) >= 2
    assert {run.settings["size"] for run in runs} == {"small" if size == "small" else "full"}
    of_a_cluster = size in ("paper", "theta")
    assert of_a_cluster or max(run.num_ranks for run in runs) <= 4
    deterministic = {run.settings["deterministic"] for run in runs}
    assert deterministic == {not of_a_cluster and name != "allreduce"}


def test_the_ready_made_studies_cover_the_papers_sweeps():
    lines = CliRunner().invoke(cli, ["study", "list"]).output.splitlines()
    assert [line.split(":")[0] for line in lines] == list_studies()
    figures = {f"Figure {i}" for i in (3, *range(6, 22))}
    wanted = figures | {f"Table {i}" for i in (2, 3, 4, 5, 6)}
    assert {
        what for what in wanted if any(re.search(rf"\b{what}\b", line) for line in lines)
    } == wanted
    assert set(READY) >= {(name, size) for name in list_studies() for size in ("small", "paper")}
