"""Jobs under a real Slurm, from submission to record."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, wait_until
from tests.integration import slurm as real
from tests.integration.ranks import assert_ranks
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

STEPS = "--train_steps 2 --val_steps 1 --test_steps 1"
SMALL = "--size small --conv 4 20 1 --pool 10 --dense 8"
ENDLESS = f"{SMALL} --epochs 200000 --epochs_scaling weak"
SUBMIT = "from candle_p1.cli.submit import command; command()"
LIMIT_S = 240
STUDY = """\
title = "Two seeds"
benchmark = "nt3"
repeats = 2
minutes = 10

[sizes.small]
ranks = [2]
threads = 1

[sizes.small.flags]
size = "small"
conv = [4, 20, 1]
pool = [10]
dense = [8]
epochs = 1
epochs_scaling = "weak"
train_steps = 2
val_steps = 1
test_steps = 1
"""


SHARED = """base = "slurm"
title = "a cluster whose jobs share nodes"
directives = []
"""


@pytest.fixture(scope="module")
def slurm(data_directory):
    """Slurm on this machine, whose jobs find data and Python."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    reason = real.missing()
    if reason is not None:
        pytest.skip(f"no Slurm: {reason}")
    directory = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # sockets need a short path
    (directory / "shared.toml").write_text(SHARED)
    cluster = real.Slurm(directory)
    cluster.environment |= {
        "CANDLE_DATA_DIR": str(data_directory),
        "CANDLE_P1_MACHINES": str(directory),
        "CANDLE_P1_ROOT": str(ROOT),
        "CANDLE_P1_VENV": sys.prefix,
        "CANDLE_P1_PREFLIGHT": "0",
        "OMP_NUM_THREADS": "1",
    }
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def submit(slurm, tmp_path_factory):
    """Submits NT3 on two ranks; returns the job's id and the directory of its script and record."""

    def submit(*arguments, before=(), **variables):
        command = [sys.executable, "-c", SUBMIT, "nt3", "--machine", "shared", "--nodes", "1"]
        place = tmp_path_factory.mktemp("job")
        output = run([*before, *command, *arguments], place, slurm, variables)
        job, script = re.search(r"submitted job (\d+): ?(\S+)", output.replace("\n", "")).groups()
        return job, Path(script).parent

    return submit


@pytest.fixture(scope="module")
def limited_job(submit):
    """An endless job whose time limit of a few minutes passes during the other tests.

    It leaves the processor to them, because Slurm passes its niceness on.
    """
    return submit("--time", "3", "--", *ENDLESS.split(), before=("nice", "-n", "19"))


@pytest.fixture(scope="module")
def ended(slurm):
    """Waits for the end of a job; returns its record and what it printed."""

    def ended(job, directory):
        wait_until(lambda: slurm.has_ended(job), LIMIT_S)
        path = directory / "run.json"
        assert path.exists(), printed_by(directory) + slurm.logs()
        wait_until(lambda: read_record(path)["status"] != "running", 30)
        return read_record(path), printed_by(directory) + slurm.logs()

    return ended


def run(command, directory, slurm, variables):
    """Runs a command in a directory; returns its output."""
    done = subprocess.run(
        [str(word) for word in command],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env=slurm.environment | variables,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + printed_by(directory)
    return done.stdout


def printed_by(directory):
    """Returns what jobs have printed."""
    return "\n".join(path.read_text() for path in directory.glob("*.out"))


def test_from_submission_to_record(limited_job, submit, ended):
    flags = f"{SMALL} {STEPS} --epochs 1 --epochs_scaling weak"
    job, directory = submit("--", *flags.split(), CANDLE_P1_PREFLIGHT="1")
    record, printed = ended(job, directory)
    assert record["status"] == "ok", printed
    assert_ranks(record, "srun", [(0, 0), (0, 1)])
    assert "srun --nodes=1 --ntasks=2 --ntasks-per-node=2 --export=ALL --mpi=pmix" in printed


def test_a_rank_that_is_killed_leaves_a_failed_record(limited_job, slurm, submit, ended):
    job, directory = submit("--", *ENDLESS.split())
    wait_until(lambda: "/200000" in printed_by(directory) or slurm.has_ended(job), LIMIT_S)
    assert "/200000" in printed_by(directory), printed_by(directory) + slurm.logs()
    rank = next(
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("SLURM_JOB_ID") == job
        and process.info["environ"].get("PMIX_RANK") == "1"
    )
    os.kill(rank.pid, signal.SIGKILL)
    record, printed = ended(job, directory)
    assert record["status"] == "failed", printed
    assert (record["failure"]["rank"], record["failure"]["pid"]) == (1, rank.pid)
    assert "died" in record["failure"]["reason"]
    assert slurm.state(job).strip() == "FAILED"


def test_the_time_limit_leaves_an_interrupted_record(limited_job, ended):
    """Slurm counts in minutes, and sends its warning up to one minute early."""
    record, printed = ended(*limited_job)
    assert record["status"] == "interrupted", printed
    assert "SIGTERM" in record["failure"]["reason"]


def test_a_study_is_a_chain_of_jobs(slurm, ended, tmp_path):
    """Its jobs request whole nodes, so this comes after the others."""
    (tmp_path / "two.toml").write_text(STUDY)
    line = ["nt3", "--machine", "slurm", "--study", "two.toml", "--study-size", "small"]
    output = run([sys.executable, "-c", SUBMIT, *line], tmp_path, slurm, {})
    jobs = re.findall(r"submitted job (\d+): ?(\S+)", re.sub(r"\n(?!submitted)", "", output))
    (first, _), (second, _) = jobs
    assert f"afterany:{first}" in slurm.say("scontrol", "show", "job", second)
    for job, script in jobs:
        record, printed = ended(job, Path(script).parent)
        assert record["status"] == "ok", printed
        assert record["launcher"] == "srun"
    output = run([sys.executable, "-c", SUBMIT, *line], tmp_path, slurm, {})
    assert "0 jobs" in output
