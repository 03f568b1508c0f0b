"""The scripts of job arrays, and what becomes of their jobs."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from candle_p1.cluster.job import JobRequest
from candle_p1.cluster.layout import Layout
from candle_p1.cluster.machine import load_machine
from candle_p1.cluster.submission import JobArray, array_syntax
from candle_p1.errors import ParameterError, SetupError


def job(name):
    machine = load_machine(name)
    return JobRequest(
        machine=machine,
        layout=Layout.on(machine, machine.min_nodes),
        name="run",
        program="nt3.py",
        flags=[],
        minutes=30,
        output="out/job",
    )


def array(machine_name, directory, num_jobs=3, at_once=2):
    scripts = [directory / f"run{number}/job.sh" for number in range(num_jobs)]
    for script in scripts:
        script.parent.mkdir()
        script.write_text(f"echo $0; exit {scripts.index(script)}\n")
    jobs = [job(machine_name)] * num_jobs
    return JobArray("study", jobs, scripts, at_once, directory / "arrays/000")


@pytest.mark.parametrize(
    ("machine_name", "lines"),
    [
        ("slurm", ["#SBATCH --array=0-2%2", "#SBATCH --job-name=study", "job.%a.%j.out"]),
        ("summit", ['#BSUB -J "study[1-3]%2"', "job.%I.%J.out"]),
        ("pbs", ["#PBS -J 0-2%2", "#PBS -N study", "job.^array_index^.out"]),
    ],
)
def test_the_directives_of_an_array(machine_name, lines, tmp_path):
    text = array(machine_name, tmp_path).text()
    assert all(line in text for line in lines)
    unlimited = replace(array(machine_name, tmp_path / "arrays", 0), at_once=None)
    unlimited = replace(unlimited, jobs=[job(machine_name)] * 3)
    assert "%2" not in unlimited.text()


@pytest.mark.parametrize(
    ("machine_name", "variable", "first"),
    [
        ("slurm", "SLURM_ARRAY_TASK_ID", 0),
        ("summit", "LSB_JOBINDEX", 1),
        ("pbs", "PBS_ARRAY_INDEX", 0),
    ],
)
def test_each_index_becomes_the_script_of_a_run(machine_name, variable, first, tmp_path):
    wanted = array(machine_name, tmp_path)
    script = tmp_path / "array.sh"
    script.write_text(wanted.text())
    for number, own in enumerate(wanted.scripts):
        environment = {"PATH": "/usr/bin:/bin", variable: str(first + number)}
        done = subprocess.run(["bash", script], check=False, env=environment, timeout=20)
        assert done.returncode == number
        assert (own.parent / "job.out").read_text() == f"{own}\n"


def test_a_scheduler_without_arrays():
    with pytest.raises(ParameterError, match=r"--array: the scheduler of theta, cobalt, has no"):
        array_syntax(job("theta"))


@pytest.fixture
def scheduler(monkeypatch, tmp_path):
    """Puts a command into $PATH that prints a text and ends with a code."""

    def scheduler(name, prints, code=0):
        path = tmp_path / "bin" / name
        path.parent.mkdir()
        path.write_text(
            f'#!/bin/bash\necho "$@" >"{tmp_path}/argv"\necho "{prints}"\nexit {code}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")

    return scheduler


@pytest.mark.parametrize(
    ("machine_name", "command", "prints", "ids"),
    [
        ("slurm", "sbatch", "12", ["12_0", "12_1", "12_2"]),
        ("summit", "bsub", "Job <12> is submitted to queue <batch>.", ["12[1]", "12[2]", "12[3]"]),
        ("pbs", "qsub", "12[].server", ["12[].server"] * 3),
    ],
)
def test_each_job_has_an_id(machine_name, command, prints, ids, scheduler, tmp_path):
    scheduler(command, prints)
    wanted = array(machine_name, tmp_path)
    array_id = wanted.submit(after="11")
    assert prints.startswith(("Job <" * (command == "bsub")) + array_id)
    assert "11" in (tmp_path / "argv").read_text()
    assert [(path.parent / "job.id").read_text().strip() for path in wanted.scripts] == ids


def test_an_array_that_is_refused_can_be_submitted_again(scheduler, tmp_path):
    scheduler("sbatch", "no such partition", code=1)
    wanted = array("slurm", tmp_path)
    with pytest.raises(SetupError, match="no such partition"):
        wanted.submit()
    assert not any(path.exists() for path in (*wanted.scripts, wanted.script))


def test_a_single_job_is_no_array(scheduler, tmp_path):
    """PBS refuses "-J 0-0"."""
    scheduler("qsub", "12.server")
    wanted = array("pbs", tmp_path, num_jobs=1)
    assert "#PBS -J" not in wanted.text()
    assert "#PBS -N run\n" in wanted.text()
    assert wanted.submit(after="11") == "12.server"
    argv = (tmp_path / "argv").read_text()
    assert argv == f"-W depend=afterany:11 {tmp_path}/run0/job.sh\n"
    assert (tmp_path / "run0/job.id").read_text() == "12.server\n"
