from __future__ import annotations

from dataclasses import replace

import pytest

from candle_p1.cluster.job import JobOptions, JobRequest
from candle_p1.cluster.layout import Layout
from candle_p1.cluster.machine import load_machine
from candle_p1.cluster.schedulers import SCHEDULERS, find_scheduler, warning_s
from candle_p1.errors import ParameterError, SetupError

CHOSEN = {"project": "ABC123", "queue": "debug"}


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
    )
    options = {name: changes.pop(name) for name in ("project", "queue") if name in changes}
    return replace(request, options=JobOptions(**CHOSEN | options), **changes)


@pytest.mark.parametrize(
    ("machine_name", "options"),
    [
        ("summit", ["-P ABC123", "-q debug", "-W 1:30", "-o out/job.%J.out"]),
        ("theta", ["-A ABC123", "-q debug", "-t 90", "-O out/job"]),
        (
            "frontier",
            [
                *("--account=ABC123", "--partition=debug", "--time=01:30:00"),
                "--output=out/job.%j.out",
            ],
        ),
        ("polaris", ["-A ABC123", "-q debug", "-l walltime=01:30:00", "-o out/job.out"]),
    ],
)
def test_directives_of_a_job(machine_name, options):
    """tests/files/jobs has all directives of each machine."""
    request = job(machine_name)
    scheduler = request.scheduler
    assert {f"{scheduler.prefix} {option}" for option in options} <= set(request.directives())


def test_without_a_scheduler_there_are_no_directives():
    assert job("local", num_nodes=1).directives() == []


def test_directives_of_a_machine_may_have_short_options(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('base = "slurm"\nqueue_option = "-q"\ndirectives = ["-C gpu"]\n')
    lines = job(str(path)).directives()
    assert {"#SBATCH -q debug", "#SBATCH -C gpu"} <= set(lines)


def test_cores_and_gpus_are_asked_for_where_jobs_share_nodes(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(
        'base = "pbs"\ncores_per_node = 32\ncores_per_rank = 8\ngpus_per_node = 4\n'
        "gpus_per_rank = 1\n"
    )
    request = job(str(path))
    select = "#PBS -l select=2:mpiprocs=2:ompthreads=8:ncpus=16:ngpus=2"
    assert select in request.directives()


def test_a_chunk_of_pbs_has_a_cpu_for_each_rank_at_least():
    request = job("pbs")
    select = "#PBS -l select=2:mpiprocs=2:ompthreads=1:ncpus=2"
    assert select in request.directives()


def test_slurm_is_asked_for_the_gpus_of_a_node(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('base = "slurm"\ngpus_per_node = 4\ngpus_per_rank = 1\n')
    request = job(str(path))
    assert "#SBATCH --gpus-per-node=2" in request.directives()


@pytest.mark.parametrize(
    ("name", "line", "after"),
    [
        ("lsf", "bsub x.sh", "bsub -w ended(7) x.sh"),
        ("cobalt", "qsub x.sh", "qsub --dependencies 7 x.sh"),
        ("slurm", "sbatch --parsable x.sh", "sbatch --parsable --dependency=afterany:7 x.sh"),
        ("pbs", "qsub x.sh", "qsub -W depend=afterany:7 x.sh"),
        ("none", "bash x.sh", "bash x.sh"),
    ],
)
def test_the_command_that_submits(name, line, after):
    scheduler = find_scheduler(name)
    assert " ".join(scheduler.submit_command("x.sh")) == line
    assert " ".join(scheduler.submit_command("x.sh", after="7")) == after


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("lsf", "bsub x.sh"),
        ("cobalt", "qsub -O out/job-2 x.sh"),
        ("slurm", "sbatch --parsable x.sh"),
        ("pbs", "qsub -o out/job-2.out x.sh"),
    ],
)
def test_a_further_job_has_an_output_of_its_own(name, line):
    assert " ".join(find_scheduler(name).submit_command("x.sh", output="out/job-2")) == line


@pytest.mark.parametrize(("minutes", "seconds"), [(1, 7), (2, 15), (11, 82), (12, 90), (600, 90)])
def test_short_jobs_are_warned_later(minutes, seconds):
    assert warning_s(minutes) == seconds
    lines = job("slurm", minutes=minutes).directives()
    assert f"#SBATCH --signal=B:USR1@{seconds}" in lines


def test_lsf_counts_the_warning_in_minutes():
    for minutes, wait in ((2, 1), (90, 2)):
        request = job("summit", minutes=minutes)
        assert f"#BSUB -wt {wait}" in request.directives()


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


def test_output_without_a_job_id():
    with pytest.raises(SetupError, match="'no luck'"):
        SCHEDULERS["lsf"].read_job_id("no luck\n")


def test_an_unknown_scheduler():
    with pytest.raises(ParameterError, match=r"'sge'.* lsf, cobalt"):
        find_scheduler("sge")


@pytest.mark.parametrize(
    ("machine_name", "changes", "problem"),
    [
        ("summit", {"project": None}, "--project"),
        ("summit", {"output": "my runs/job"}, "'my runs/job'"),
        ("summit", {"minutes": 0}, "time limit 0"),
        ("summit", {"queue": None, "minutes": 121}, "121 minutes on 2 nodes.* 120 minutes"),
        ("polaris", {"queue": None}, "2 nodes.* prod of polaris .* 10 .* debug or debug-scaling"),
        ("aurora", {"queue": None}, "2 nodes.* prod of aurora .* 256 .* debug-scaling or capacity"),
        ("aurora", {"num_nodes": 100, "queue": None}, "100 nodes.* 256 .*: debug-scaling"),
        ("aurora", {"num_nodes": 20000, "queue": None}, "20,000 nodes.* 10,624"),
        ("aurora", {"num_nodes": 3}, "3 nodes.* debug of aurora .* 1 to 2; debug-scaling and cap"),
        ("aurora", {"num_nodes": 600}, "600 nodes.* debug of aurora .* 1 to 2; prod would"),
        ("frontier", {"num_nodes": 65, "queue": "extended"}, "65 nodes.* 1 to 64; batch would"),
        ("polaris", {}, "90 minutes.* debug of polaris .* 60 minutes"),
    ],
)
def test_jobs_that_a_machine_does_not_accept(machine_name, changes, problem):
    with pytest.raises(ParameterError, match=problem):
        job(machine_name, **changes).check()


def test_queues_whose_limits_are_not_known_accept_everything():
    job("summit", queue="killable", minutes=1000).check()
    job("polaris", queue="debug", minutes=60).check()
    job("polaris", queue="a reservation".replace(" ", "_"), minutes=10_000).check()
    job("slurm", queue=None, project=None, minutes=100_000).check()
