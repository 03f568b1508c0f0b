from __future__ import annotations

from dataclasses import replace

import pytest

from candle_p1.cluster.job_request import JobRequest
from candle_p1.cluster.layout import Layout
from candle_p1.cluster.machine import load_machine
from candle_p1.cluster.schedulers import SCHEDULERS, find_scheduler, scheduler_of
from candle_p1.errors import ParameterError, SetupError


def job(machine_name, num_nodes=2, **changes):
    machine = load_machine(machine_name)
    request = JobRequest(
        machine=machine,
        layout=Layout.on(machine, num_nodes),
        name="nt3_weak",
        program="nt3.py",
        flags=[],
        minutes=90,
        output="out/job",
        project="ABC123",
        queue="debug",
    )
    return replace(request, **changes)


@pytest.mark.parametrize(
    ("machine_name", "lines"),
    [
        (
            "summit",
            [
                "#BSUB -P ABC123",
                "#BSUB -q debug",
                "#BSUB -J nt3_weak",
                "#BSUB -nnodes 2",
                "#BSUB -W 1:30",
                "#BSUB -o out/job.%J.out",
                "#BSUB -wa TERM",
                "#BSUB -wt 2",
                '#BSUB -alloc_flags "nvme smt4"',
            ],
        ),
        (
            "theta",
            [
                "#COBALT -A ABC123",
                "#COBALT -q debug",
                "#COBALT -n 2",
                "#COBALT -t 90",
                "#COBALT --jobname nt3_weak",
                "#COBALT -O out/job",
                "#COBALT --attrs mcdram=cache:numa=quad",
            ],
        ),
        (
            "frontier",
            [
                "#SBATCH --account=ABC123",
                "#SBATCH --partition=debug",
                "#SBATCH --job-name=nt3_weak",
                "#SBATCH --nodes=2",
                "#SBATCH --ntasks-per-node=8",
                "#SBATCH --cpus-per-task=7",
                "#SBATCH --time=01:30:00",
                "#SBATCH --output=out/job.%j.out",
                "#SBATCH --signal=B:TERM@60",
                "#SBATCH --constraint=nvme",
            ],
        ),
        (
            "polaris",
            [
                "#PBS -A ABC123",
                "#PBS -q debug",
                "#PBS -N nt3_weak",
                "#PBS -l select=2:mpiprocs=4",
                "#PBS -l walltime=01:30:00",
                "#PBS -j oe",
                "#PBS -o out/job.out",
                "#PBS -l place=scatter",
                "#PBS -l filesystems=home:eagle",
            ],
        ),
    ],
)
def test_directives(machine_name, lines):
    request = job(machine_name)
    assert scheduler_of(request).lines(request) == lines


def test_cores_and_gpus_are_asked_for_where_jobs_share_nodes(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(
        'base = "pbs"\ncores_per_node = 32\ncores_per_rank = 8\ngpus_per_node = 4\n'
        "gpus_per_rank = 1\n"
    )
    request = job(str(path))
    select = "#PBS -l select=2:mpiprocs=2:ncpus=16:ngpus=2"
    assert select in scheduler_of(request).lines(request)


def test_a_quality_of_service_is_a_queue_too():
    request = job("perlmutter", queue=None)
    assert "#SBATCH --qos=regular" in scheduler_of(request).lines(request)


def test_a_generic_machine_names_neither_queue_nor_project():
    request = job("slurm", queue=None, project=None)
    assert scheduler_of(request).lines(request)[0] == "#SBATCH --job-name=nt3_weak"


def test_no_scheduler_has_no_directives():
    assert find_scheduler("none").lines(job("local", num_nodes=1)) == []


@pytest.mark.parametrize(
    ("name", "line", "after"),
    [
        ("lsf", "bsub x.lsf", "bsub -w ended(7) x.lsf"),
        ("cobalt", "qsub x.lsf", "qsub --dependencies 7 x.lsf"),
        (
            "slurm",
            "sbatch --parsable x.lsf",
            "sbatch --parsable --dependency=afterany:7 x.lsf",
        ),
        ("pbs", "qsub x.lsf", "qsub -W depend=afterany:7 x.lsf"),
        ("none", "bash x.lsf", "bash x.lsf"),
    ],
)
def test_the_command_that_submits(name, line, after):
    scheduler = find_scheduler(name)
    assert " ".join(scheduler.submit_command("x.lsf")) == line
    assert " ".join(scheduler.submit_command("x.lsf", after="7")) == after


@pytest.mark.parametrize(
    ("name", "output", "job_id"),
    [
        ("lsf", "Job <12> is submitted to default queue <batch>.\n", "12"),
        ("cobalt", "Job routed to queue 'default'.\n12\n", "12"),
        ("slurm", "12\n", "12"),
        ("slurm", "12;cluster\n", "12"),
        ("pbs", "12.server.site\n", "12.server.site"),
    ],
)
def test_the_id_of_a_job(name, output, job_id):
    assert find_scheduler(name).read_job_id(output) == job_id


def test_a_command_that_names_no_job():
    with pytest.raises(SetupError, match="bsub named no job; it printed: 'no luck'"):
        SCHEDULERS["lsf"].read_job_id("no luck\n")


def test_an_unknown_scheduler():
    with pytest.raises(ParameterError, match="scheduler 'sge': choose one of lsf, cobalt"):
        find_scheduler("sge")


@pytest.mark.parametrize(
    ("machine_name", "changes", "problem"),
    [
        ("summit", {"project": None}, "summit charges jobs to a project: .*--project"),
        ("summit", {"output": "my runs/job"}, "'my runs/job' holds a blank"),
        ("summit", {"minutes": 0}, "a minute or more"),
        ("summit", {"queue": None, "minutes": 121}, "121 minutes on 2 nodes: summit gives 120"),
        ("polaris", {"queue": None}, "2 nodes: the queue prod of polaris takes 10 or more"),
    ],
)
def test_jobs_that_a_machine_does_not_take(machine_name, changes, problem):
    with pytest.raises(ParameterError, match=problem):
        job(machine_name, **changes).check()


def test_limits_are_those_of_the_default_queue():
    job("summit", queue="killable", minutes=1000).check()
    job("polaris", queue="debug").check()
    job("slurm", queue=None, project=None, minutes=100_000).check()
