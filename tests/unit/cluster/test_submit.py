"""candle-p1 submit, with schedulers that only note what they are given: tests/files/submit."""

import os
import signal
import sys

import pytest
from click.testing import CliRunner

from candle_p1.cli.submit import submit_command
from tests.conftest import ROOT
from tests.transcripts import Transcripts

SUBMISSIONS = Transcripts(ROOT / "tests/files/submit")
STUDY = """\
title = "Two\\nbatch sizes"
benchmark = "nt3"
repeats = 1
minutes = 20
flags.epochs_scaling = "weak"
vary.batch_size = [5, 10]
environment.HOROVOD_CYCLE_TIME = "2"
sizes.paper = {ranks = [1, 4], flags = {size = "small"}}
sizes.odd = {ranks = [3]}
"""


@pytest.mark.parametrize("name", SUBMISSIONS.cases)
def test_submissions(name, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    (tmp_path / "two.toml").write_text(STUDY)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("CANDLE_P1_PYTHON", sys.executable)
    monkeypatch.setenv("ROOT", str(ROOT))
    monkeypatch.delenv("CANDLE_P1_PROJECT", raising=False)
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    SUBMISSIONS.check(name, tmp_path, monkeypatch)


def test_the_environment_is_named_in_the_script_unless_it_is_the_usual_one(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/opt/venv")
    result = CliRunner().invoke(submit_command, ["nt3", "--machine", "slurm", "--dry_run"])
    assert "job_default CANDLE_P1_VENV /opt/venv\n" in result.output


def test_ctrl_c_waits_for_the_end_of_a_local_job_and_starts_no_other(start):
    job = "trap 'sleep 1; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    program = (
        "import sys, pathlib; from candle_p1.cluster.submission import run_here\n"
        f"sys.exit(run_here({['sh', '-c', job]!r}, pathlib.Path(), 3))"
    )
    process = start([sys.executable, "-c", program])
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=120)[0] == ""
    assert process.returncode == 9
