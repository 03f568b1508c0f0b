"""candle-p1 submit: writes a job script for a machine and submits it to the machine's scheduler."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from candle_p1.benchmark import SCALING_MODES, Benchmark, find_benchmark
from candle_p1.cli import base
from candle_p1.cli.study import OUTPUT
from candle_p1.cluster import submission
from candle_p1.cluster.chain import CHAIN_NAME
from candle_p1.cluster.job import JobOptions, JobRequest, find_image, job_flags
from candle_p1.cluster.machine import Layout, Machine, load_machine
from candle_p1.cluster.schedulers import Scheduler
from candle_p1.cluster.staging import StagedEnvironment
from candle_p1.errors import ParameterError
from candle_p1.parameters.catalog import INTERVALS
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.record import RECORD_NAME
from candle_p1.scaling import epochs_of_ranks
from candle_p1.studies.jobs import StudyJobs, with_checkpoints
from candle_p1.studies.plan import MAX_RUNS, Choice, make_plan
from candle_p1.studies.study_file import find_study
from candle_p1.text import columns, count, printable, wrap_command
from candle_p1.training.run_directory import run_directories
from candle_p1.training.screen import Screen

MAX_CHAIN = 100
"""A longer chain is more likely a mistake than intended."""


def _read_minutes(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,6}(:\d{1,6}){0,2}", text):
        raise ParameterError(f"--time {text}: give minutes, H:MM or H:MM:SS")
    first, *rest = map(int, text.split(":"))
    return first * 60 + rest[0] + any(rest[1:]) if rest else first


def _read_nodes(context: click.Context, parameter: click.Parameter, text: str | None) -> list[str]:
    """Returns the names of nodes; Slurm's, such as n[1-3,7], may have commas in brackets."""
    return re.findall(r"(?:\[[^\]]*\]|[^,\[])+|\[", text) if text else []


@click.command(
    "submit",
    cls=base.BenchmarkCommand,
    examples=[
        "candle-p1 submit nt3 --machine slurm --nodes 2 --epochs 16",
        "candle-p1 submit nt3 --machine polaris --project P --dry_run",
        "candle-p1 submit nt3 --machine slurm --study strong-nt3",
    ],
)
@base.benchmark_argument
@base.option(
    "--machine",
    "Machine: summit, theta, frontier, perlmutter, polaris, aurora, slurm, pbs, local, or a file"
    " that describes another one.",
    name="machine_name",
    metavar="NAME|FILE.toml",
    shell_complete=base.complete_machine,
    required=True,
)
@base.number_option(
    "--nodes",
    "Number of nodes; default: 1, or for a study's runs as many as their ranks need.",
    name="num_nodes",
)
@base.number_option("--ranks_per_node", "Ranks on each node; default: the machine's usual number.")
@base.option(
    "--time",
    "Time limit of the job; default: the machine's, which is usually an hour.",
    name="minutes",
    metavar="MINUTES|H:MM",
    callback=_read_minutes,
)
@base.option("--project", "Project to charge the job to.", envvar="CANDLE_P1_PROJECT")
@base.option("--queue", "Queue (Slurm: partition or QOS); default: the machine's.")
@base.option(
    "--mode",
    "Scaling as in the paper: the ranks share the benchmark's epochs (strong, the default), or"
    " each rank trains 8 (weak).",
    SCALING_MODES,
)
@base.option(
    "--study",
    "Submit a study's runs of this benchmark, each as a separate job, one after another.",
    metavar="NAME|FILE.toml",
    shell_complete=base.complete_study,
)
@base.option("--study_size", "Size of the study.", default="paper")
@base.number_option(
    "--at_once",
    "How many jobs of a study may run at the same time; default: 1, or all of a job array.",
)
@base.option("--study_output", "Directory for a study's results.", base.DIRECTORY, default=OUTPUT)
@base.option("--study_ranks", "Numbers of ranks of a study's runs.", base.NumberList())
@base.number_option(
    "--study_repeats", "Number of runs of each configuration of a study.", most=MAX_RUNS
)
@base.number_option(
    "--chain",
    "Number of jobs to submit; each continues the run from its newest checkpoint after the previous"
    " job has ended, until the run is complete. With --study, the maximum for each run.",
    name="num_jobs",
    most=MAX_CHAIN,
)
@base.option(
    "--array",
    "Submit a study's runs of the same size as one job array (LSF, Slurm, PBS).",
    name="as_array",
    is_flag=True,
)
@base.option(
    "--exclude",
    "Names of nodes that jobs must not use. PBS cannot exclude nodes: there, jobs request one"
    " more for each, and leave these unused.",
    metavar="NODE,...",
    callback=_read_nodes,
)
@base.option(
    "--container",
    "Run the ranks in a container: the file of an image, or a name that the machine's runtime"
    " accepts.",
    metavar="IMAGE",
)
@base.option(
    "--stage_env",
    "Pack the virtual environment into one archive, which jobs copy to the local storage of each"
    " node to start Python from it.",
    is_flag=True,
)
@base.option("--retry_failed", "Also submit a study's runs that failed.", is_flag=True)
@base.option("--dry_run", "Only print the script.", is_flag=True)
@base.flags_argument
def submit_command(
    benchmark: str, machine_name: str, study: str | None, flags: tuple[str, ...], **given: Any
) -> None:
    """Submit the training of BENCHMARK (a name or the path of a folder) as a batch job.

    Unless flags say otherwise, data have the published size and, except on this machine, runs are
    not reproducible bit for bit (--deterministic False). All other flags go to the benchmark. The
    script is saved beside the record.

    With --study, every run of the study becomes a job, which waits for the previous one. Repeating
    the command submits the runs that are neither done nor submitted.

    With --stage_env or --container, thousands of ranks do not read Python's many small files from
    one file system.

    With --chain, a run may take longer than the time limit of a job. Checkpoints are written before
    the time limit and, unless flags set an interval, every ten minutes, of which the newest two are
    kept (--ckpt_every_s 600 --ckpt_save_best False --ckpt_keep_limit 2).
    """
    chosen, machine = find_benchmark(benchmark), load_machine(machine_name)
    num_jobs, image, dry_run = given["num_jobs"], given["container"], given["dry_run"]
    if given["as_array"] and (study is None or num_jobs is not None):
        raise ParameterError("--array requires --study, and cannot be combined with --chain")
    if given["stage_env"] and image is not None:
        raise ParameterError("--stage_env and --container cannot be combined: an image is one file")
    options = JobOptions(
        project=given["project"],
        queue=given["queue"],
        exclude=given["exclude"],
        container=None if image is None else find_image(machine, image),
        staged=_archive(dry_run) if given["stage_env"] else None,
    )
    params = chosen.declaration.parse(flags, chosen.model_file)
    if params.origin("gpus").kind == "flag" and len(params["gpus"] or ()) == 1:
        click.echo(
            f"warning: --gpus {params['gpus'][0]} is the index of the only GPU that ranks use on"
            " each node, not a number of GPUs: --ranks_per_node gives each rank its own, without"
            " --gpus",
            err=True,
        )
    if study is None:
        _submit_one(*_one_job(chosen, machine, options, flags, given), num_jobs, dry_run=dry_run)
        return
    if given["num_nodes"] is not None or given["mode"] is not None:
        raise ParameterError(
            "--nodes and --mode cannot be combined with --study, which determines both"
        )
    output, size = given["study_output"], given["study_size"]
    runs = Choice(size, given["study_ranks"], given["study_repeats"], flags=list(flags))
    plan = make_plan(find_study(study), runs, output)
    if num_jobs is not None:
        plan = with_checkpoints(plan, output)
    jobs = StudyJobs(plan, machine, given["ranks_per_node"], given["minutes"], options, num_jobs)
    _submit_study(jobs, chosen.name, given)


def _archive(dry_run: bool) -> str:
    archive = StagedEnvironment.of(submission.checkout())
    if not dry_run:
        screen = Screen()
        if not archive.path.exists():
            screen.say(f"packing {count(len(archive.members), 'file')} of {sys.prefix} ...")
        num_bytes = archive.write()
        screen.say(f"jobs copy {num_bytes / 2**30:.1f} GiB to each node: {archive.path}")
    return str(archive.path)


def _one_job(
    benchmark: Benchmark,
    machine: Machine,
    options: JobOptions,
    flags: tuple[str, ...],
    given: Mapping[str, Any],
) -> tuple[JobRequest, Path]:
    layout = Layout.on(machine, given["num_nodes"] or 1, given["ranks_per_node"])
    declaration, model_file = benchmark.declaration, benchmark.model_file
    mode, is_chain = given["mode"] or "strong", given["num_jobs"] is not None
    wanted = job_flags(benchmark, machine, mode)
    chosen = declaration.parse(flags, model_file)
    if is_chain and not any(chosen.origin(name).is_explicit for name in INTERVALS):
        wanted |= submission.CHAIN_FLAGS
    if chosen.origin("data_parallel").is_explicit:  # epochs_scaling follows from it
        wanted.pop("epochs_scaling", None)
    missing = {name: wanted[name] for name in wanted if not chosen.origin(name).is_explicit}
    added = [word for name, value in missing.items() for word in (f"--{name}", value)]
    params = declaration.parse([*added, *flags], model_file)
    if is_chain:
        submission.check_continues(params)
    share = epochs_of_ranks(params, layout.num_ranks)
    directory, directory_flags = _run_directory(benchmark.name, params)
    root = submission.checkout()
    job = JobRequest(
        machine=machine,
        layout=layout,
        name=f"{benchmark.name}_{mode}",
        program=str(benchmark.script),
        flags=[*added, *flags, *directory_flags],
        minutes=machine.minutes if given["minutes"] is None else given["minutes"],
        output=str(directory / "job"),
        options=options,
        root=str(root),
        venv=submission.virtual_environment(root),
        heading=[
            f"{benchmark.title}: {count(layout.num_ranks, 'rank')} on {machine.title}.",
            f"{layout.explain()}; epochs of each rank: {share}.",
        ],
        chain_directory=str(directory) if is_chain else None,
    )
    return job, directory


def _submit_one(job: JobRequest, directory: Path, num_jobs: int | None, *, dry_run: bool) -> None:
    job.check()
    text, script = job.script(), submission.script_path(job.machine, directory)
    argv = job.scheduler.submit_command(script)
    if dry_run:
        click.echo(wrap_command(argv, columns(sys.stderr), "$ "), err=True)
        if num_jobs is not None and num_jobs > 1:
            click.echo(_chain_note(job.scheduler, num_jobs), err=True)
        click.echo(text, nl=False)
        return
    submission.release(directory)  # of a chain that ended before its run began
    submission.write_script(script, text, num_jobs)
    screen = Screen()
    screen.say_command(argv)
    if job.machine.scheduler == "none":
        raise click.exceptions.Exit(submission.run_here(argv, directory, num_jobs or 1))
    _say_submitted(submission.submit(job, script, num_jobs=num_jobs), script)


def _run_directory(name: str, params: ParameterSet) -> tuple[Path, list[str]]:
    """Returns the directory of the job's record, and the flags that choose it.

    Jobs without a --run_id are numbered JOB000, JOB001 and so on, so that a run that starts while
    the job waits, and takes the next free number RUN000, does not take the job's directory.
    """
    *numbered, directory = run_directories(name, params, prefix="JOB")
    directory = next((path for path in numbered if not path.exists()), directory)
    if params["output_dir"] == ".":
        flags = ["--output_dir", "."]
    else:
        flags = ["--output_dir", str(directory.parent.parent), "--run_id", directory.name]
    if (directory / RECORD_NAME).exists() or submission.was_submitted(directory):
        raise ParameterError(
            f"{directory} already belongs to a run: choose another --run_id, --experiment_id or"
            " --output_dir, or resubmit the script in it to continue a run that ended early"
        )
    return directory, flags


def _chain_note(scheduler: Scheduler, num_jobs: int) -> str:
    if not scheduler.wait:
        return f"run up to {num_jobs} times, one after the other, until the run is complete"
    wait = shlex.join(each.format("JOB") for each in scheduler.wait)
    return f"submitted {num_jobs} times, after the first with {wait}, where JOB is the previous one"


def _say_submitted(ids: list[str], script: Path) -> None:
    Screen().say(f"submitted job{'s' * (len(ids) > 1)} {', '.join(ids)}: {script}")


def _submit_study(jobs: StudyJobs, benchmark: str, given: Mapping[str, Any]) -> None:
    at_once, as_array = given["at_once"], given["as_array"]
    due, under_way = jobs.due(benchmark, given["retry_failed"])
    screen = Screen()
    if under_way:
        names = ", ".join(state.run.name for state in under_way)
        screen.say(
            f"already submitted and not finished: {names}. To submit one of them again, move its"
            " directory away. If its jobs were cancelled, delete its job script (and"
            f" {CHAIN_NAME}, if it is a chain) instead; the run is then continued, or repeated"
        )
    num_jobs = jobs.num_jobs or 1
    node_hours = sum(job.layout.num_nodes * job.minutes for _, job in due) * num_jobs / 60
    what = count(len(due), "job" if num_jobs == 1 else "chain")
    what += f" of up to {num_jobs} jobs" * (num_jobs > 1)
    arrays = jobs.arrays(due, at_once) if as_array else []
    how = f"in {count(len(arrays), 'job array')}, " if as_array else ""
    if at_once is not None or not as_array:
        how += f"{at_once or 1} at a time, "
    screen.say(
        f"{what} of {jobs.plan.study.name}, {how}with time limits that add up to"
        f" {node_hours:,.1f} node hours"
    )
    if given["dry_run"]:
        for place, job in due:
            click.echo(printable(f"{job.name}: {place}"), err=True)
        if due and num_jobs > 1:
            click.echo(_chain_note(due[0][1].scheduler, num_jobs), err=True)
        if due:
            click.echo(arrays[0].text() if arrays else due[0][1].script(), nl=False)
    elif as_array:
        for array_id, array in jobs.submit_arrays(arrays):
            what = f"array {array_id} of {count(len(array.jobs), 'job')}"
            screen.say(f"submitted {what if array.is_array else f'job {array_id}'}: {array.script}")
    else:
        for ids, script in jobs.submit(due, at_once or 1, under_way):
            _say_submitted(ids, script)
