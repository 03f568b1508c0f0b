"""Jobs of a Slurm with a daemon on each of two nodes."""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import CANDLE_P1, NT3_SCRIPT, await_end, wait_until
from tests.integration.slurm import running
from tests.records import read_record

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
LIMIT_S = 60
END_S = 30
ON_TWO_NODES = ("srun", "--nodes=2", "--ntasks-per-node=2", "--mpi=pmix")


@pytest.fixture
def slurm(cluster):
    """Slurm on two nodes."""
    nodes = cluster(2).nodes
    with running(nodes, TMPDIR=str(nodes[0].temporary)) as slurm:
        yield slurm


def test_ranks_on_this_machine_stay_there_in_an_allocation_of_two_nodes(
    slurm, start, tables, tmp_path
):
    """And what srun starts without MPI is refused, while a process of the script may train."""
    script = f"STEPS=2 {sys.executable} {HERE / 'watched_run.py'}"
    runs = {
        "here": f"{shlex.join(CANDLE_P1)} run nt3 --np 2",
        "alone": script,
        "srun": f"srun --mpi=none {sys.executable} {NT3_SCRIPT}",
    }
    flags = shlex.join(map(str, tables))
    lines = [f"{runs[name]} {flags} --run_id {name} >{name}.txt 2>&1; echo $?" for name in runs]
    (tmp_path / "job.sh").write_text("\n".join(["#!/bin/bash", *lines, ""]))
    options = ["--wait", "--nodes=2", "--ntasks-per-node=1", "--output=codes"]
    command = slurm.here("sbatch", *options, f"--chdir={tmp_path}", tmp_path / "job.sh")
    await_end(start(command, env=slurm.environment), 3 * LIMIT_S)
    assert (tmp_path / "codes").read_text().split() == ["0", "0", "2"]
    record = read_record(tmp_path / "out/EXP000/here/run.json")
    assert [rank["host"] for rank in record["ranks"]] == ["node1"] * 2
    printed = (tmp_path / "srun.txt").read_text()
    assert printed.count("SLURM_STEP_NUM_TASKS=2") == 1
    assert not (tmp_path / "out/EXP000/srun").exists()


def test_srun_starts_ranks_on_two_nodes(slurm, start, tables, tmp_path):
    argv = [sys.executable, HERE / "watched_run.py", *tables]
    command = slurm.here(*ON_TWO_NODES, f"--chdir={tmp_path}", *argv)
    environment = slurm.environment | {"STEPS": "2"}
    code, output = await_end(start([*command, "--run_id", "short"], env=environment), LIMIT_S)
    print(output)
    assert code == 0, output
    record = read_record(tmp_path / "out/EXP000/short/run.json")
    assert (record["launcher"], record["num_nodes"]) == ("srun", 2)
    assert [rank["host"] for rank in record["ranks"]] == ["node1"] * 2 + ["node2"] * 2
    assert record["data"]["num_copies"] == 2
    digests = [path.read_text() for path in tmp_path.glob("rank*.sha256")]
    assert len(digests) == 4
    assert len(set(digests)) == 1

    for path in tmp_path.glob("rank*.phase"):
        path.unlink()
    environment["STEPS"] = "1000000"
    job = start([*command, "--run_id", "killed"], env=environment)
    victim = tmp_path / "rank3.phase"
    wait_until(victim.exists, LIMIT_S, job)
    os.kill(int(victim.read_text().split()[0]), signal.SIGKILL)
    code, output = await_end(job, END_S)
    print(output)
    assert code != 0
    failure = read_record(tmp_path / "out/EXP000/killed/run.json")["failure"]
    assert (failure["rank"], failure["host"], failure["phase"]) == (3, "node2", "train")
