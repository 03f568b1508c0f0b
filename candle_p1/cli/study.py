"""candle-p1 study: executes sweeps, and resumes those that were interrupted."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from candle_p1.cli import base
from candle_p1.cluster.process import Interrupted
from candle_p1.studies.display import duration, render_status, show_plan
from candle_p1.studies.execute import execute_study
from candle_p1.studies.plan import MAX_RUNS, Choice, Plan, make_plan, read_plan
from candle_p1.studies.state import finished, states_of
from candle_p1.studies.study_file import find_study, list_studies
from candle_p1.training.screen import Screen

OUTPUT = "output"
"""The directory for the results of studies, unless the user names another one."""

_output = base.option(
    "-o --output",
    "Directory for results; those of a study go to STUDY-SIZE in it.",
    base.DIRECTORY,
    default=OUTPUT,
)
_size = base.option(
    "--size", "Size of the study, such as small, files or paper; by default its first one."
)


def _plan_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of `show` and `run`; the function gets the plan that they ask for."""

    @functools.wraps(function)
    def command(name: str, output: Path, **options: Any) -> None:
        choice = {field.name: options.pop(field.name) for field in fields(Choice)}
        function(make_plan(find_study(name), Choice(**choice), output), **options)

    decorated: Callable[..., None] = base.together(
        click.argument("name", shell_complete=base.complete_study),
        _size,
        _output,
        base.option("--ranks", "Numbers of ranks.", base.NumberList()),
        base.number_option("--folds", "Cross-validation: number of folds.", least=2, most=MAX_RUNS),
        base.number_option("--repeats", "Number of runs of each configuration.", most=MAX_RUNS),
        base.number_option("--seed", "Seed of the order of the runs.", least=0),
        base.flags_argument,
    )(command)
    return decorated


@click.group("study", cls=base.Group)
def study_command() -> None:
    """Run sweeps over ranks and parameters unattended, and resume them."""


@study_command.command("list", cls=base.Command, examples=["candle-p1 study list"])
def list_command() -> None:
    """List the available studies, with the parts of the paper that they reproduce."""
    screen = Screen()
    for name in list_studies():
        study = find_study(name)
        shows = f" ({', '.join(study.shows)})" if study.shows else ""
        screen.say(f"{name}: {study.title}{shows}; {', '.join(study.sizes)}")


@study_command.command(
    "show",
    cls=base.BenchmarkCommand,
    examples=["candle-p1 study show strong-nt3", "candle-p1 study show weak-nt3 --ranks 1,2"],
)
@_plan_options
def show_command(plan: Plan) -> None:
    """Show the runs of study NAME (or FILE.toml), their order, and how long they will take.

    All other flags go to the benchmark, in all runs.
    """
    show_plan(plan, states_of(plan.runs), Screen())


@study_command.command(
    "run",
    cls=base.BenchmarkCommand,
    examples=[
        "candle-p1 study run strong-nt3",
        "candle-p1 study run strong-nt3 --ranks 1,2 --data_dir DIR",
        "candle-p1 study run FILE.toml --folds 5 --repeats 1 --data_dir DIR",
    ],
)
@_plan_options
@base.option("--dry_run", "Show the runs and start nothing.", is_flag=True)
@base.option("--retry_failed", "Repeat runs that failed earlier.", is_flag=True)
def run_command(plan: Plan, dry_run: bool, retry_failed: bool) -> None:
    """Run study NAME (or FILE.toml) on this machine, or resume it.

    Runs that are done are not repeated. All other flags go to the benchmark, in all runs. The exit
    code is 1 unless all runs are done.
    """
    screen = Screen()
    if dry_run:
        show_plan(plan, states_of(plan.runs), screen)
        return
    screen.say(f"{plan.study.name}, {plan.size}: {plan.study.title}")
    try:
        states = execute_study(plan, screen, retry_failed)
    except Interrupted as interrupted:
        num_done = len(finished(states_of(plan.runs)))
        screen.say(f"interrupted: {num_done} of {len(plan.runs)} runs are done; to resume:")
        screen.say_command(["candle-p1", *sys.argv[1:]])
        raise click.exceptions.Exit(128 + interrupted.number) from None
    done = finished(states)
    for part in render_status(plan, states):
        screen.say(part)
    total = duration(sum(state.total_s for state in done))
    screen.say(f"runs took {total} in total; records: {plan.directory}")
    if len(done) < len(plan.runs):
        raise click.exceptions.Exit(1)


@study_command.command("status", cls=base.Command, examples=["candle-p1 study status strong-nt3"])
@click.argument("name", metavar="NAME|DIRECTORY", shell_complete=base.complete_study)
@_size
@_output
def status_command(name: str, size: str | None, output: Path) -> None:
    """Show the progress of study NAME, or of the study in DIRECTORY."""
    directory = Path(name)
    if not directory.is_dir():
        study = find_study(name)
        directory = output / f"{study.name}-{study.size(size)[0]}"
    plan = read_plan(directory)
    screen = Screen()
    for part in render_status(plan, states_of(plan.runs)):
        screen.say(part)
