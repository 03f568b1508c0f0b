"""The job scripts of Summit and Theta, unchanged, from submission to record.

The commands of those machines are replaced by fakes, which check their arguments and start the
ranks on this machine.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import CANDLE_P1, ROOT, await_end, wait_until
from tests.integration.conftest import assert_ranks
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

ALL = "CANDLE_P1_ALL_JOBS"
"""If set, all ready scripts of Summit and Theta run, which takes minutes; otherwise one of each."""
FAKES = Path(__file__).parent / "fakes"
STEPS = "--train_steps 2 --val_steps 1 --test_steps 1"
SMALL = {
    "nt3": f"--size small --conv 4 20 1 --pool 10 --dense 8 {STEPS}",
    "p1b1": f"--size small --dense 8 {STEPS}",
    "p1b2": f"--size small --dense 8 {STEPS}",
    "p1b3": f"--size small --dense 8 {STEPS}",
}


@pytest.fixture
def settings(environment, mpirun, monkeypatch):
    """Variables of a job; also puts the fakes into $PATH."""
    monkeypatch.setenv("PATH", f"{FAKES}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    return {
        "CANDLE_P1_ROOT": str(ROOT),
        "CANDLE_P1_VENV": sys.prefix,
        "CANDLE_P1_MODULES": "",
        "CANDLE_DATA_DIR": environment["CANDLE_DATA_DIR"],
        "OMP_NUM_THREADS": "1",
        "CANDLE_P1_GPUS_PER_NODE": "0",  # which Summit's jobs ask for, and are not here
    }


@pytest.fixture
def set_all(settings, monkeypatch):
    """Sets these in the environment, which LSF passes on to a job."""

    def set_all(**further):
        for name, value in (settings | further).items():
            monkeypatch.setenv(name, value)

    return set_all


def ready(pattern, one):
    """Returns the ready scripts to run, as parameters of a test."""
    scripts = sorted((ROOT / "jobs").glob(pattern))
    chosen = scripts if ALL in os.environ else [each for each in scripts if each.stem == one]
    return pytest.mark.parametrize("script", chosen, ids=lambda path: path.name)


def flags_for(script, num_ranks):
    """Returns flags that make the run of a ready script small: one epoch on each rank."""
    benchmark, mode = Path(script).stem.split("_")
    shares = mode == "strong" and benchmark != "p1b3"
    return f"{SMALL[benchmark]} --epochs {num_ranks if shares else 1}"


def record_of(directory, script):
    benchmark = Path(script).stem.split("_")[0]
    return read_record(directory / f"output/{benchmark}/EXP000/RUN000/run.json")


def printed_by(directory):
    """Returns what jobs have printed."""
    return "\n".join(
        path.read_text()
        for ending in ("out", "output", "error")
        for path in directory.glob(f"*.{ending}")
    )


@ready("summit/*.lsf", "p1b3_strong")
def test_the_scripts_for_summit_run(script, set_all, succeed, tmp_path):
    """NT3 under strong scaling runs with all ranks of a node, the others with two of them.

    Horovod averages, as it does on the GPUs of Summit, so that its settings are in the record.
    """
    num_ranks = 6 if script.name == "nt3_strong.lsf" else 2
    set_all(
        CANDLE_P1_FLAGS=flags_for(script, num_ranks) + " --averaging horovod",
        CANDLE_P1_PREFLIGHT="1",
        FAKE_MAX_RANKS=str(num_ranks),
    )
    succeed(["bsub", "-P", "ABC123", "-nnodes", "1", script])
    record, printed = record_of(tmp_path, script), printed_by(tmp_path)
    assert record["status"] == "ok", printed
    assert_ranks(record, "jsrun", [(0, rank) for rank in range(num_ranks)])
    assert record["environment"]["settings"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert record["parameters"]["deterministic"]["value"] is False
    assert record["distributed"]["settings"]["HOROVOD_FUSION_THRESHOLD"] != "0"
    assert "jsrun -n 6 -r 6 -a 1 -c 7 -g 1 -d packed -b packed:7" in printed
    assert ("starts 2 of 6 ranks" in printed) == (num_ranks == 2)


def test_a_job_that_asked_for_gpus_ends_where_there_are_none(set_all, execute, tmp_path):
    """Before any rank makes or reads data; preflight is off, so the run itself finds out."""
    hosts = tmp_path / "hosts"
    hosts.write_text("batch1\nh01n01\n")
    set_all(
        CANDLE_P1_GPUS_PER_NODE="6",
        CANDLE_P1_FLAGS=flags_for("p1b2_weak", 2),
        CANDLE_P1_PREFLIGHT="0",
        FAKE_MAX_RANKS="2",
        LSB_DJOB_HOSTFILE=str(hosts),
        LSB_JOBID="1",
        USER="user",
    )
    code, printed = execute(["bash", ROOT / "jobs/summit/p1b2_weak.lsf"])
    assert code == 2, printed
    record = record_of(tmp_path, "p1b2_weak.lsf")
    reason = record["failure"]["reason"]
    assert (record["status"], record["failure"]["phase"]) == ("failed", "startup")
    assert "the job asked for GPUs (CANDLE_P1_GPUS_PER_NODE=6)" in reason
    assert "tensorflow-cpu" in reason
    assert printed.count("the job asked for GPUs") == 1
    assert "load" not in record.get("phases", {})


@ready("theta/*.sh", "p1b2_strong")
def test_the_scripts_for_theta_run(script, settings, succeed, tmp_path):
    """On two nodes, with a rank on each."""
    variables = settings | {
        "CANDLE_P1_FLAGS": flags_for(script, 2),
        "CANDLE_P1_PREFLIGHT": "1",
        "CANDLE_P1_MINUTES": "60",
    }
    env = ":".join(f"{name}={value}" for name, value in variables.items())
    succeed(["qsub", "-A", "ABC123", "-n", "2", "-t", "60", "--env", env, script])
    record, printed = record_of(tmp_path, script), printed_by(tmp_path)
    assert record["status"] == "ok", printed
    assert_ranks(record, "aprun", [(0, 0), (1, 0)])
    assert record["environment"]["settings"]["KMP_BLOCKTIME"] == "0"
    assert "aprun -n 2 -N 1 -d 64 -j 1 -cc depth" in printed


def test_a_job_near_its_time_limit_leaves_an_interrupted_record(set_all, start, tmp_path):
    flags = SMALL["nt3"].replace(STEPS, "") + " --epochs 100000"
    set_all(CANDLE_P1_FLAGS=flags, FAKE_MAX_RANKS="2", CANDLE_P1_PREFLIGHT="0")
    script = ROOT / "jobs/summit/nt3_weak.lsf"
    bsub = start(["bsub", "-P", "ABC123", "-nnodes", "1", script])
    wait_until(lambda: "/100000" in printed_by(tmp_path), 120, bsub)
    bsub.send_signal(signal.SIGUSR1)
    await_end(bsub, 60)
    record = tmp_path / "output/nt3/EXP000/RUN000/run.json"
    # The watchdog server outlives the job.
    wait_until(lambda: read_record(record)["status"] != "running", 30)
    assert read_record(record)["status"] == "interrupted", printed_by(tmp_path)


def test_ranks_train_in_a_container(set_all, succeed, tmp_path):
    """What stands in for Apptainer runs their commands on this machine."""
    (tmp_path / "image.sif").write_text("")
    set_all()
    line = f"submit nt3 --machine local --container image.sif -- {SMALL['nt3']} --epochs 2"
    output = succeed([*CANDLE_P1, *line.split()])
    record = read_record(tmp_path / "output/nt3/EXP000/JOB000/run.json")
    assert (record["status"], record["num_ranks"]) == ("ok", 2), output
    settings = record["environment"]["settings"]
    assert settings["CANDLE_P1_CONTAINER"] == f"{tmp_path}/image.sif"
