"""candle-p1 submit: writes a job script for a machine and submits it to the machine's scheduler."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from candle_p1.benchmark import SCALING_MODES, find_benchmark
from candle_p1.checkpoints.policy import INTERVALS
from candle_p1.cli.base import (
    BenchmarkCommand,
    benchmark_argument,
    complete_machine,
    complete_study,
    flags_argument,
)
from candle_p1.cli.study import OUTPUT, read_ranks
from candle_p1.cluster.chain_flags import CHAIN_FLAGS, check_continues
from candle_p1.cluster.job_request import JobRequest
from candle_p1.cluster.job_script import job_script
from candle_p1.cluster.layout import Layout
from candle_p1.cluster.local_jobs import run_here
from candle_p1.cluster.machine import load_machine
from candle_p1.cluster.ready_scripts import job_flags
from candle_p1.cluster.schedulers import scheduler_of
from candle_p1.cluster.submission import (
    checkout,
    release,
    script_path,
    submit,
    virtual_environment,
    was_submitted,
    write_script,
)
from candle_p1.errors import ParameterError
from candle_p1.records.record import RECORD_NAME
from candle_p1.scaling import share_epochs
from candle_p1.studies.jobs import StudyJobs, with_checkpoints
from candle_p1.studies.plan import MAX_RUNS, Choice, make_plan
from candle_p1.studies.study_file import find_study
from candle_p1.text import columns, count, printable, wrap_command
from candle_p1.training.run_directory import run_directories
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from candle_p1.benchmark import Benchmark
    from candle_p1.cluster.machine import Machine
    from candle_p1.cluster.schedulers import Scheduler
    from candle_p1.parameters.parameter_set import ParameterSet

MAX_CHAIN = 100
"""A longer chain is more likely a mistake than meant."""


def _read_minutes(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> int | None:
    """Returns a time limit in minutes, from "90" (minutes), "1:30" (hours) or "1:30:00"."""
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) > 3 or not all(re.fullmatch(r"\d{1,6}", part) for part in parts):
        raise ParameterError(f"--time {text}: give minutes, H:MM or H:MM:SS")
    if len(parts) == 1:
        return int(parts[0])
    hours, minutes, seconds = (int(part) for part in [*parts, "0"][:3])
    return hours * 60 + minutes + (seconds > 0)


@click.command(
    "submit",
    cls=BenchmarkCommand,
    examples=[
        "candle-p1 submit nt3 --machine slurm --nodes 2 --epochs 16",
        "candle-p1 submit nt3 --machine polaris --project P --dry-run",
        "candle-p1 submit nt3 --machine slurm --study strong-nt3",
    ],
)
@benchmark_argument
@click.option(
    "--machine",
    "machine_name",
    metavar="NAME|FILE.toml",
    shell_complete=complete_machine,
    required=True,
    help="Machine: summit, theta, frontier, perlmutter, polaris, aurora, slurm, pbs, local, or a"
    " file that describes another one.",
)
@click.option(
    "--nodes",
    "num_nodes",
    type=click.IntRange(min=1),
    help="Number of nodes, 1 by default; a study's runs have as many as their ranks need.",
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    help="Ranks on each node; default: the machine's usual number.",
)
@click.option(
    "--time",
    "minutes",
    metavar="MINUTES|H:MM",
    callback=_read_minutes,
    help="Time limit of the job; default: the machine's, which is usually an hour.",
)
@click.option("--project", envvar="CANDLE_P1_PROJECT", help="Project to charge the job to.")
@click.option("--queue", help="Queue (Slurm: partition or QOS); default: the machine's.")
@click.option(
    "--mode",
    type=click.Choice(SCALING_MODES),
    help="Scaling as in the paper: the ranks share the benchmark's epochs (strong, the default), or"
    " each rank trains 8 (weak).",
)
@click.option(
    "--study",
    metavar="NAME|FILE.toml",
    shell_complete=complete_study,
    help="Submit a study's runs of this benchmark, each as a job of its own, one after another.",
)
@click.option(
    "--study-size", default="paper", show_default=True, help="Size of the study, such as paper."
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many jobs of a study may run at the same time.",
)
@click.option(
    "--study-output",
    type=click.Path(file_okay=False, path_type=Path),
    default=OUTPUT,
    show_default=True,
    help="Directory for a study's results.",
)
@click.option(
    "--study-ranks",
    metavar="N,N,...",
    callback=read_ranks,
    help="Numbers of ranks of a study's runs.",
)
@click.option(
    "--study-repeats",
    type=click.IntRange(1, MAX_RUNS),
    help="How often a study runs each configuration.",
)
@click.option(
    "--chain",
    "num_jobs",
    metavar="N",
    type=click.IntRange(1, MAX_CHAIN),
    help="Submit N jobs, each of which continues the run from its newest checkpoint after the one"
    " before has ended, until it is complete. With --study, up to N jobs for each run.",
)
@click.option("--retry-failed", is_flag=True, help="Also submit a study's runs that failed.")
@click.option("--dry-run", is_flag=True, help="Only print the script.")
@flags_argument
def command(
    benchmark: str,
    machine_name: str,
    num_nodes: int | None,
    ranks_per_node: int | None,
    minutes: int | None,
    project: str | None,
    queue: str | None,
    mode: str | None,
    study: str | None,
    study_size: str,
    at_once: int,
    study_output: Path,
    study_ranks: list[int] | None,
    study_repeats: int | None,
    num_jobs: int | None,
    retry_failed: bool,
    dry_run: bool,
    flags: tuple[str, ...],
) -> None:
    """Submit the training of BENCHMARK (a name or the path of a folder) as a batch job.

    Data have the published size, and except on this machine, runs do not repeat bit for bit
    (--deterministic False), unless flags say otherwise. All other flags go to the benchmark. The
    script is saved beside the record.

    With --study, every run of the study becomes a job, which waits for the one before. Repeating
    the command submits the runs that are neither done nor submitted.

    With --chain, a run may take longer than the time limit of a job. Checkpoints are written before
    the time limit and, unless flags set an interval, every ten minutes, of which the newest two are
    kept (--ckpt_every_s 600 --ckpt_save_best False --ckpt_keep_limit 2).
    """
    chosen = find_benchmark(benchmark)
    machine = load_machine(machine_name)
    if study is None:
        layout = Layout.on(machine, num_nodes or 1, ranks_per_node)
        minutes = machine.minutes if minutes is None else minutes
        job, directory = _one_job(
            chosen, machine, layout, mode or "strong", minutes, flags, is_chain=num_jobs is not None
        )
        _submit(replace(job, project=project, queue=queue), directory, num_jobs, dry_run)
        return
    if num_nodes is not None or mode is not None:
        raise ParameterError(
            "--nodes and --mode cannot be combined with --study, which determines both"
        )
    choice = Choice(study_size, study_ranks, study_repeats, flags=list(flags))
    plan = make_plan(find_study(study), choice, study_output)
    if num_jobs is not None:
        plan = with_checkpoints(plan, study_output)
    jobs = StudyJobs(plan, machine, ranks_per_node, minutes, project, queue, num_jobs)
    _submit_study(jobs, chosen.name, at_once, retry_failed, dry_run)


def _one_job(
    benchmark: Benchmark,
    machine: Machine,
    layout: Layout,
    mode: str,
    minutes: int,
    flags: tuple[str, ...],
    *,
    is_chain: bool,
) -> tuple[JobRequest, Path]:
    """Returns the job of a single run, and the directory of its record."""
    declaration, model_file = benchmark.declaration, benchmark.model_file
    wanted = job_flags(benchmark, machine, mode)
    given = declaration.parse(flags, model_file)
    if is_chain and not any(given.origin(name).is_explicit for name in INTERVALS):
        wanted |= CHAIN_FLAGS
    added = _added_flags(wanted, given)
    params = declaration.parse([*added, *flags], model_file)
    if is_chain:
        check_continues(params)
    _, share = share_epochs(
        params["epochs"], layout.num_ranks, params["epochs_scaling"], params["data_parallel"]
    )
    directory, directory_flags = _run_directory(benchmark.name, params)
    root = checkout()
    job = JobRequest(
        machine=machine,
        layout=layout,
        name=f"{benchmark.name}_{mode}",
        program=str(benchmark.script),
        flags=[*added, *flags, *directory_flags],
        minutes=minutes,
        output=str(directory / "job"),
        root=str(root),
        venv=virtual_environment(root),
        heading=[
            f"{benchmark.title}: {count(layout.num_ranks, 'rank')} on {machine.title}.",
            f"{layout.explain()}; epochs of each rank: {share}.",
        ],
        chain_directory=str(directory) if is_chain else None,
    )
    return job, directory


def _submit(job: JobRequest, directory: Path, num_jobs: int | None, dry_run: bool) -> None:
    """Submits a job or a chain; where there is no scheduler, runs it and exits with its code."""
    job.check()
    text = job_script(job)
    script = script_path(job, directory)
    scheduler = scheduler_of(job)
    argv = scheduler.submit_command(script)
    if dry_run:
        click.echo(wrap_command(argv, columns(sys.stderr), "$ "), err=True)
        if num_jobs is not None and num_jobs > 1:
            click.echo(_chain_note(scheduler, num_jobs), err=True)
        click.echo(text, nl=False)
        return
    release(directory)  # of a chain that ended before its run began
    write_script(script, text, num_jobs)
    screen = Screen()
    screen.say_command(argv)
    if job.machine.scheduler == "none":
        raise click.exceptions.Exit(run_here(argv, directory, num_jobs or 1))
    screen.say(f"{_submitted(submit(job, script, num_jobs=num_jobs))}: {script}")


def _chain_note(scheduler: Scheduler, num_jobs: int) -> str:
    """Returns how often a script is submitted, and how its jobs wait for each other."""
    if not scheduler.wait:
        return f"run up to {num_jobs} times, one after the other, until the run is complete"
    wait = shlex.join(option.format("JOB") for option in scheduler.wait)
    return f"submitted {num_jobs} times, after the first with {wait}, where JOB is the one before"


def _submitted(ids: list[str]) -> str:
    """Returns what has been submitted, as "submitted job 12" or "submitted jobs 12, 13"."""
    return f"submitted job{'s' * (len(ids) > 1)} {', '.join(ids)}"


def _submit_study(
    jobs: StudyJobs, benchmark: str, at_once: int, retry_failed: bool, dry_run: bool
) -> None:
    """Submits the jobs of a study; a dry run prints the script of the first one."""
    due, under_way = jobs.due(benchmark, retry_failed)
    screen = Screen()
    if under_way:
        names = ", ".join(state.run.name for state in under_way)
        screen.say(
            f"already submitted and not finished: {names}. To submit one of them again, move its"
            " directory away"
        )
    num_jobs = jobs.num_jobs or 1
    node_hours = sum(job.layout.num_nodes * job.minutes for _, job in due) * num_jobs / 60
    what = count(len(due), "job" if num_jobs == 1 else "chain")
    what += f" of up to {num_jobs} jobs" * (num_jobs > 1)
    screen.say(
        f"{what} of {jobs.plan.study.name}, {at_once} at a time, with time limits"
        f" that add up to {node_hours:,.1f} node hours"
    )
    if dry_run:
        for place, job in due:
            click.echo(printable(f"{job.name}: {place}"), err=True)
        if due:
            if num_jobs > 1:
                click.echo(_chain_note(scheduler_of(due[0][1]), num_jobs), err=True)
            click.echo(job_script(due[0][1]), nl=False)
        return
    for ids, script in jobs.submit(due, at_once, under_way):
        screen.say(f"{_submitted(ids)}: {script}")


def _added_flags(wanted: dict[str, str], params: ParameterSet) -> list[str]:
    """Returns the job's own flags as arguments, without those that the user has set."""
    if params.origin("data_parallel").is_explicit:  # epochs_scaling follows from it
        wanted = {name: wanted[name] for name in wanted if name != "epochs_scaling"}
    return [
        word
        for name, value in wanted.items()
        if not params.origin(name).is_explicit
        for word in (f"--{name}", value)
    ]


def _run_directory(name: str, params: ParameterSet) -> tuple[Path, list[str]]:
    """Returns the directory of the job's record, and the flags that choose it.

    Jobs without a --run_id are numbered JOB000, JOB001 and so on, so that a run that starts while
    the job waits, and takes the next free number RUN000, does not take the job's directory.

    Raises:
        ParameterError: The directory already holds a record or a script.
    """
    *numbered, directory = run_directories(name, params, prefix="JOB")
    directory = next((path for path in numbered if not path.exists()), directory)
    if params["output_dir"] == ".":
        flags = ["--output_dir", "."]
    else:
        flags = ["--output_dir", str(directory.parent.parent), "--run_id", directory.name]
    if (directory / RECORD_NAME).exists() or was_submitted(directory):
        raise ParameterError(
            f"{directory} already belongs to a run: choose another --run_id, --experiment_id or"
            " --output_dir, or submit the script in it again to continue a run that has ended early"
        )
    return directory, flags
