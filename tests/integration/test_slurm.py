"""Jobs under a real Slurm, from submission to record."""

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, await_end, start_group, wait_until
from tests.environments import make_venv
from tests.integration.conftest import assert_ranks
from tests.integration.slurm import running
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

SMALL = "--size small --conv 4 20 1 --pool 10 --dense 8"
ENDLESS = f"{SMALL} --epochs 200000 --epochs_scaling weak"
SUBMIT = "from candle_p1.cli.submit import submit_command; submit_command()"
LIMIT_S = 240
EPOCH_S = 2.0
STUDY = """\
title = "Two seeds"
benchmark = "nt3"
repeats = 2
minutes = 10
[sizes.small]
ranks = [1]
threads = 1
flags = { size = "small", dense = [8], epochs = 2, train_steps = 2, val_steps = 1, test_steps = 1 }
"""
SHARED = 'base = "slurm"\ntitle = "a cluster whose jobs share nodes"\ndirectives = []\n'


@pytest.fixture(scope="module")
def slurm(data_directory):
    """Slurm on this machine, whose jobs find data and Python."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    variables = {"CANDLE_DATA_DIR": str(data_directory), "CANDLE_P1_ROOT": str(ROOT)}
    variables |= {"CANDLE_P1_VENV": sys.prefix, "CANDLE_P1_PREFLIGHT": "0", "OMP_NUM_THREADS": "1"}
    with running(**variables) as cluster:
        (cluster.directory / "shared.toml").write_text(SHARED)
        cluster.environment["CANDLE_P1_MACHINES"] = str(cluster.directory)
        yield cluster


@pytest.fixture(scope="module")
def submit(slurm, tmp_path_factory):
    """Submits NT3 on two ranks; returns the jobs' ids and the directory of script and record."""

    def submit(*arguments, **variables):
        command = [sys.executable, "-c", SUBMIT, "nt3", "--machine", "shared", "--nodes", "1"]
        place = tmp_path_factory.mktemp("job")
        output = run([*command, *arguments], place, slurm, variables)
        found = re.search(r"submitted jobs? ([\d, ]+): ?(\S+)", output.replace("\n", ""))
        return found[1].split(", "), Path(found[2]).parent

    return submit


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    """Variables of a job whose Python runs slow_nt3.py: an epoch takes EPOCH_S or more."""
    slow = ROOT / "tests/integration/slow_nt3.py"
    python = tmp_path_factory.mktemp("paced") / "python"
    python.write_text(
        "#!/bin/bash\n"
        f'[[ $1 != */nt3_baseline_keras2.py ]] || set -- "{slow}" "${{@:2}}"\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    return {
        "CANDLE_P1_PYTHON": str(python),
        "NT3_FOLDER": str(ROOT / "benchmarks/nt3"),
        "SLOW_RANKS": "0,1",
        "SLOW_S": str(EPOCH_S / 24),  # before each of 14 steps, and ten times before an epoch
    }


@pytest.fixture(scope="module")
def limited_job(submit, paced):
    """An endless job whose time limit of two minutes passes during the other tests.

    It leaves the processor to them, because it mostly sleeps. It has more time to end than Slurm's
    limit would give it on a busy machine.
    """
    return submit("--time", "2", "--", *ENDLESS.split(), **paced, CANDLE_P1_WARNING_S="22")


@pytest.fixture(scope="module")
def ended(slurm):
    """Waits for the end of the last of these jobs; returns its record and what it printed."""

    def ended(jobs, directory):
        wait_until(lambda: slurm.has_ended(jobs[-1]), LIMIT_S)
        path = directory / "run.json"
        assert path.exists(), printed_by(directory) + slurm.logs()
        wait_until(lambda: read_record(path)["status"] != "running", 30)
        return read_record(path), printed_by(directory) + slurm.logs()

    return ended


def run(command, directory, slurm, variables):
    """Runs a command in a directory; returns its output."""
    job = start_group(command, directory, env=slurm.environment | variables)
    code, output = await_end(job, LIMIT_S)
    assert code == 0, output + printed_by(directory)
    return output


def printed_by(directory, job=None):
    """Returns what jobs, or one job, have printed so far."""
    pattern = f"job.{job}.out" if job else "*.out"
    return "\n".join(path.read_text() for path in directory.glob(pattern))


def test_a_rank_that_is_killed_leaves_a_failed_record(limited_job, slurm, submit, ended):
    (job,), directory = submit("--", *ENDLESS.split())
    wait_until(lambda: "/200000" in printed_by(directory) or slurm.has_ended(job), LIMIT_S)
    assert "/200000" in printed_by(directory), printed_by(directory) + slurm.logs()
    rank = next(
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("SLURM_JOB_ID") == job
        and process.info["environ"].get("PMIX_RANK") == "1"
    )
    os.kill(rank.pid, signal.SIGKILL)
    record, printed = ended([job], directory)
    assert record["status"] == "failed", printed
    assert (record["failure"]["rank"], record["failure"]["pid"]) == (1, rank.pid)
    assert "died" in record["failure"]["reason"]
    assert slurm.state(job).strip() == "FAILED"


def test_a_chain_of_jobs_continues_one_run(limited_job, slurm, submit, paced, ended):
    """The first job is warned as Slurm warns it of its limit, the second completes the run."""
    flags = f"{SMALL} --epochs 6 --epochs_scaling weak"
    variables = paced | {"CANDLE_P1_PREFLIGHT": "1"}
    jobs, directory = submit("--chain", "3", "--", *flags.split(), **variables)
    wait_until(lambda: "/6 " in printed_by(directory, jobs[0]), LIMIT_S)
    slurm.say("scancel", "--batch", "--signal=USR1", jobs[0])
    wait_until(lambda: slurm.has_ended(jobs[0]), LIMIT_S)
    assert slurm.state(jobs[0]).strip() == "FAILED", printed_by(directory)
    record, printed = ended(jobs, directory)
    assert [slurm.state(job).strip() for job in jobs[1:]] == ["COMPLETED"] * 2
    assert "srun" not in printed_by(directory, jobs[2])
    assert record["status"] == "ok", printed
    assert [part["status"] for part in record["segments"]] == ["interrupted", "ok"]
    assert (record["totals"]["num_segments"], record["totals"]["lost_steps"]) == (2, 0)
    assert len(record["training"]["epochs"]) == 6
    assert_ranks(record, "srun", [(0, 0), (0, 1)])
    assert "srun --nodes=1 --ntasks=2 --ntasks-per-node=2 --export=ALL --mpi=pmix" in printed


def test_the_time_limit_leaves_an_interrupted_record(limited_job, ended):
    """Slurm counts in minutes, and sends its warning up to one minute early."""
    record, printed = ended(*limited_job)
    assert record["status"] == "interrupted", printed
    assert "SIGUSR1" in record["failure"]["reason"]
    assert "SIGTERM" not in printed_by(limited_job[1])


def test_runs_of_a_study_as_an_array_with_a_staged_environment(slurm, ended, tmp_path):
    """Each on a whole node, to which sbcast copies the environment; this comes after the others."""
    node, machine, study = (tmp_path / name for name in ("node", "ours.toml", "two.toml"))
    study.write_text(STUDY)
    node.mkdir()
    machine.write_text(f'base = "slurm"\ntitle = "a cluster"\nlocal_storage = "{node}"\n')
    python = make_venv(tmp_path / ".venv")
    program = f"from candle_p1.cluster import staging; staging.ARCHIVES = {str(tmp_path)!r}; "
    line = ["nt3", "--machine", machine, "--study", study, "--study_size", "small"]
    command = [python, "-c", program + SUBMIT, *line, "--array", "--stage_env"]
    variables = {"PYTHONPATH": str(ROOT), "CANDLE_P1_VENV": str(tmp_path / ".venv")}
    output = " ".join(run(command, tmp_path, slurm, variables).split())
    array_id = re.search(r"submitted array (\d+) of 2 jobs", output)[1]
    runs = sorted(path.parent for path in tmp_path.glob("output/*/*-r?/job.sh"))
    assert len(runs) == 2
    for directory in runs:
        job = (directory / "job.id").read_text().strip()
        assert job.startswith(f"{array_id}_")
        record, printed = ended([job], directory)
        assert record["status"] == "ok", printed
        assert any(word.startswith(f"{node}/candle_p1-env-") for word in record["command"]), printed
    assert list(node.iterdir()) == []
    assert "0 jobs" in run(command, tmp_path, slurm, variables)
