"""Submitting a study: each of its runs as a job, a chain of jobs, or part of a job array."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from candle_p1.cluster.chain import CHAIN_NAME
from candle_p1.cluster.job_script import job_script
from candle_p1.cluster.schedulers import scheduler_of
from candle_p1.text import count, printable
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from candle_p1.cluster.schedulers import Scheduler
    from candle_p1.studies.jobs import StudyJobs


def chain_note(scheduler: Scheduler, num_jobs: int) -> str:
    """Returns how often a script is submitted, and how its jobs wait for each other."""
    if not scheduler.wait:
        return f"run up to {num_jobs} times, one after the other, until the run is complete"
    wait = shlex.join(option.format("JOB") for option in scheduler.wait)
    return f"submitted {num_jobs} times, after the first with {wait}, where JOB is the one before"


def submitted(ids: list[str]) -> str:
    """Returns what has been submitted, as "submitted job 12" or "submitted jobs 12, 13"."""
    return f"submitted job{'s' * (len(ids) > 1)} {', '.join(ids)}"


def submit_study(
    jobs: StudyJobs,
    benchmark: str,
    at_once: int | None,
    *,
    retry_failed: bool = False,
    as_array: bool = False,
    dry_run: bool = False,
) -> None:
    """Submits the jobs of a study.

    Args:
        jobs: The study.
        benchmark: The name of the benchmark whose runs are wanted.
        at_once: How many runs may be under way at a time; None is one, or all of an array.
        retry_failed: Whether to resubmit runs that have failed.
        as_array: Whether jobs of the same size form job arrays.
        dry_run: Whether to print the script of the first job or array instead.
    """
    due, under_way = jobs.due(benchmark, retry_failed)
    screen = Screen()
    if under_way:
        names = ", ".join(state.run.name for state in under_way)
        screen.say(
            f"already submitted and not finished: {names}. To submit one of them again, move its"
            " directory away. If its jobs have been cancelled, delete its job script and, of a"
            f" chain, {CHAIN_NAME} there instead; the run is then continued, or repeated"
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
    if dry_run:
        for place, job in due:
            click.echo(printable(f"{job.name}: {place}"), err=True)
        if due:
            if num_jobs > 1:
                click.echo(chain_note(scheduler_of(due[0][1]), num_jobs), err=True)
            click.echo(arrays[0].text() if arrays else job_script(due[0][1]), nl=False)
        return
    if as_array:
        for array_id, array in jobs.submit_arrays(arrays):
            what = f"array {array_id} of {count(len(array.jobs), 'job')}"
            what = what if array.is_array else f"job {array_id}"
            screen.say(f"submitted {what}: {array.script}")
        return
    for ids, script in jobs.submit(due, at_once or 1, under_way):
        screen.say(f"{submitted(ids)}: {script}")
