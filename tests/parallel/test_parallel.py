"""Runs the scripts of this folder under mpirun."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from candle_p1.distributed.backend import ENGINES
from tests.conftest import ROOT, await_end, shell_environment, start_group, wait_until
from tests.records import read_record

pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
HOROVOD = (pytest.mark.horovod, pytest.mark.extended)
JAX = (pytest.mark.jax_engine, pytest.mark.extended)
ON_FOUR = "a,a,a,a a,b,a,b a,b,c,d"


@pytest.mark.parametrize(
    ("num_ranks", "argv", "num_checks"),
    [
        (3, "check_checkpoints check_loading a,a,b", 4 + 11),
        pytest.param(
            4, f"check_checkpoints check_loading {ON_FOUR}", 3 * 15, marks=pytest.mark.extended
        ),
        pytest.param(
            3,
            "check_averaging check_measuring check_sparse check_tables check_own_step",
            19,
            marks=HOROVOD,
        ),
        pytest.param(
            2,
            "averaging=horovod check_averaging:OF_GRADIENTS check_comm check_evaluation",
            24,
            marks=HOROVOD,
        ),
        pytest.param(2, "check_averaging:OF_ENGINES check_measuring check_tables", 15, marks=JAX),
        pytest.param(2, "check_restart", 7, marks=HOROVOD),
        pytest.param(2, "check_restart:OF_STATES", 2, marks=JAX),
    ],
)
def test_checks_hold_on_all_ranks(
    mpirun, execute, monkeypatch, tmp_path, num_ranks, argv, num_checks
):
    # JAX keeps what it compiles: many checks train the same small networks.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
    code, output = execute(mpirun(num_ranks, HERE / "harness.py", *argv.split()), limit_s=1200)
    print(output)
    assert code == 0, output
    assert len(re.findall("^ok ", output, re.MULTILINE)) == num_checks


@pytest.mark.extended
def test_the_preflight_of_ranks_whose_mpi_must_not_be_called_by_several_threads(
    mpirun, execute, monkeypatch
):
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "serialized")
    nothing = ["--shm_gib=0", "--memory_gib=0", "--disk_gib=0"]
    code, output = execute(mpirun(2, "-m", "candle_p1.cluster.preflight", *nothing))
    assert (code, output.count("MPI_THREAD_SERIALIZED")) == (2, 1), output
    assert "Fix: unset MPI4PY_RC_THREAD_LEVEL" in output


@pytest.fixture(scope="module")
def begun(mpirun, data_directory, tmp_path_factory):
    """The directory of a run that two ranks have begun."""
    directory = tmp_path_factory.mktemp("begun")
    command = mpirun(2, HERE / "check_restart.py", directory, "begin")
    environment = shell_environment(data_directory)
    code, output = await_end(start_group(command, directory, env=environment), 900)
    assert code == 0, output
    return directory


@pytest.mark.extended
@pytest.mark.parametrize(("num_ranks", "epochs_left"), [(1, 4), (4, 1)])
def test_a_run_goes_on_on_other_ranks(mpirun, execute, begun, tmp_path, num_ranks, epochs_left):
    """Two of four epochs of two ranks, and four steps of the third one, are kept."""
    shutil.copytree(begun / "out", tmp_path / "out")
    command = mpirun(num_ranks, HERE / "check_restart.py", tmp_path, "continue")
    code, output = execute(command, limit_s=900)
    print(output)
    assert code == 0, output
    record = read_record(tmp_path / "out/EXP000/run/run.json")
    assert record["status"] == "ok"
    assert [part["num_ranks"] for part in record["segments"]] == [2, num_ranks]
    assert record["segments"][1]["begin"] == {"epoch": 2, "step": 0}
    assert record["plan"]["epochs_per_rank"] == 2 + epochs_left
    assert record["plan"]["learning_rate"] == pytest.approx(0.01 * num_ranks)
    losses = [epoch["metrics"]["loss"] for epoch in record["training"]["epochs"]]
    assert len(losses) == 2 + epochs_left
    at_most = losses[1] + abs(losses[1] - losses[0]) / 10
    assert losses[2] <= at_most
    assert losses[0] > at_most, "an epoch with the first weights would not be noticed"


HOROVODS_PYTHON = ROOT / ".venv/bin/python"
TOLERANCE = 1e-3
"""Of the distance between two models, relative to the way that they have gone in three epochs."""


@pytest.mark.extended
@pytest.mark.jax_engine
def test_the_engines_train_the_same_models(mpirun, execute, tmp_path):
    """Two ranks of the engine jax, and two of Horovod's in the environment beside it."""
    found = [HOROVODS_PYTHON, "-c", "import tensorflow, horovod"]
    if not HOROVODS_PYTHON.exists() or subprocess.run(found, capture_output=True).returncode:
        pytest.skip("Horovod is not installed beside JAX: make setup")
    command = mpirun(2, HERE / "harness.py", "check_benchmarks")
    code, output = execute(command, limit_s=1800)
    assert code == 0, output
    assert output.count("ok ") == 4
    launcher = HOROVODS_PYTHON.with_name(Path(command[0]).name)
    others = [HOROVODS_PYTHON if each == sys.executable else each for each in command[1:]]
    path = f"{HOROVODS_PYTHON.parent}{os.pathsep}{os.environ['PATH']}"
    code, output = execute([launcher, *others], limit_s=1800, env=os.environ | {"PATH": path})
    assert code == 0, output
    assert output.count("ok ") == 4
    for name in ("nt3", "p1b1", "p1b2", "p1b3"):
        ours, theirs = (np.load(tmp_path / f"trained/{each}/{name}.npz") for each in ENGINES)
        np.testing.assert_array_equal(ours["start"], theirs["start"])
        way = np.linalg.norm(theirs["weights"] - theirs["start"])
        assert np.linalg.norm(ours["weights"] - theirs["weights"]) < TOLERANCE * way
        np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=TOLERANCE)


MANY = 32
LIMIT_S = 30
"""A job must be gone this long after a rank is killed."""


@pytest.mark.extended
def test_many_ranks_load_one_matrix_and_are_watched(mpirun, start, nt3_tables, tmp_path):
    """The first of two runs of the same ranks finishes, and a rank is killed in the second one."""
    flags = [*nt3_tables(600, 40, 600), "--epochs", MANY]
    process = start(mpirun(MANY, HERE / "many_ranks.py", *flags))
    runs = tmp_path / "out/EXP000"
    wait_until((runs / "RUN001/run.json").exists, 600, process)
    wait_until(lambda: len(list(tmp_path.glob("rank*.phase"))) == MANY, 300, process)

    record = read_record(runs / "RUN000/run.json")
    assert record["status"] == "ok"
    assert record["num_ranks"] == MANY
    assert [each["rank"] for each in record["ranks"]] == list(range(MANY))
    assert record["data"]["num_copies"] == 1
    digests = {path.read_text() for path in tmp_path.glob("rank*.sha256")}
    assert len(digests) == 1
    shared_bytes = int((tmp_path / "shared_bytes").read_text())
    # The kernel rounds each rank's share down to kB.
    assert 0.9 * 600 * 600 * 4 < shared_bytes < 2 * 600 * 600 * 4

    victim = int((tmp_path / "rank23.phase").read_text().split()[0])
    os.kill(victim, signal.SIGKILL)
    code, output = await_end(process, LIMIT_S)
    assert code != 0
    assert f"rank 23 (host {os.uname().nodename}, pid {victim}) died" in output
    record = read_record(runs / "RUN001/run.json")
    assert record["status"] == "failed"
    assert (record["num_ranks"], record["failure"]["rank"]) == (MANY, 23)


@pytest.mark.extended
def test_a_rank_that_hangs_is_named(mpirun, start, nt3_tables, monkeypatch, tmp_path):
    """It is in an infinite loop, and gives signs of life."""
    for name, value in (("STEPS", "1000000"), ("HANGS", "1"), ("CANDLE_P1_HUNG_S", "8")):
        monkeypatch.setenv(name, value)
    script = HERE.parent / "cluster/watched_run.py"
    process = start(mpirun(3, script, *nt3_tables(20, 10, 5)))
    code, output = await_end(process, 120)
    assert code != 0
    failure = read_record(tmp_path / "out/EXP000/RUN000/run.json")["failure"]
    assert (failure["rank"], failure["phase"], failure["steps"]) == (1, "train", 7), output
    assert "the other ranks have waited for it for 8 s, at its step 6" in failure["reason"]
    assert failure["reason"] in output
