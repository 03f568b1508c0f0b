"""candle-p1 study: executes sweeps, and resumes those that were interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from candle_p1.cli.base import (
    BenchmarkCommand,
    Command,
    Group,
    NumberList,
    complete_study,
    flags_argument,
)
from candle_p1.cluster.process import Interrupted
from candle_p1.studies.display import duration, render_status, show_plan
from candle_p1.studies.execute import execute_study
from candle_p1.studies.plan import MAX_RUNS, Choice, Plan, make_plan, read_plan
from candle_p1.studies.state import finished, states_of
from candle_p1.studies.study_file import find_study, list_studies
from candle_p1.training.screen import Screen

OUTPUT = "output"
"""The directory for the results of studies, unless the user names another one."""

_output = click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=OUTPUT,
    show_default=True,
    help="Directory for results; those of a study go to STUDY-SIZE in it.",
)


_size = click.option(
    "--size", help="Size of the study, such as small, files or paper; by default its first one."
)


def _plan_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that `show` and `run` share."""
    for option in (
        flags_argument,
        click.option("--seed", type=click.IntRange(min=0), help="Seed of the order of the runs."),
        click.option(
            "--repeats", type=click.IntRange(1, MAX_RUNS), help="Number of runs of each point."
        ),
        click.option("--ranks", type=NumberList(), help="Numbers of ranks."),
        _output,
        _size,
        click.argument("name", shell_complete=complete_study),
    ):
        function = option(function)
    return function


@click.group("study", cls=Group)
def command() -> None:
    """Sweeps over ranks and parameters: run unattended, resumed, and never repeated needlessly."""


@command.command("list", cls=Command, examples=["candle-p1 study list"])
def list_command() -> None:
    """List the available studies, with the parts of the paper that they reproduce."""
    screen = Screen()
    for name in list_studies():
        study = find_study(name)
        shows = f" ({', '.join(study.shows)})" if study.shows else ""
        screen.say(f"{name}: {study.title}{shows}; {', '.join(study.sizes)}")


@command.command(
    "show",
    cls=BenchmarkCommand,
    examples=["candle-p1 study show strong-nt3", "candle-p1 study show weak-nt3 --ranks 1,2"],
)
@_plan_options
def show_command(**options: Any) -> None:
    """Show the runs of study NAME (or FILE.toml), their order, and how long they will take.

    All other flags go to the benchmark, in all runs.
    """
    _show(_plan(**options))


@command.command(
    "run",
    cls=BenchmarkCommand,
    examples=[
        "candle-p1 study run strong-nt3",
        "candle-p1 study run strong-nt3 --ranks 1,2 --data_dir DIR",
    ],
)
@_plan_options
@click.option("--dry_run", is_flag=True, help="Show the runs and start nothing.")
@click.option("--retry_failed", is_flag=True, help="Repeat runs that failed earlier.")
def run_command(dry_run: bool, retry_failed: bool, **options: Any) -> None:
    """Run study NAME (or FILE.toml) on this machine, or resume it.

    Runs that are done are not repeated. All other flags go to the benchmark, in all runs. The exit
    code is 1 unless all runs are done.
    """
    plan = _plan(**options)
    if dry_run:
        _show(plan)
        return
    screen = Screen()
    screen.say(f"{plan.study.name}, {plan.size}: {plan.study.title}")
    try:
        states = execute_study(plan, screen, retry_failed)
    except Interrupted as interrupted:
        num_done = len(finished(states_of(plan.runs)))
        screen.say(f"interrupted: {num_done} of {len(plan.runs)} runs are done; to resume:")
        screen.say_command(["candle-p1", *sys.argv[1:]])
        raise click.exceptions.Exit(128 + interrupted.number) from None
    finally:
        screen.close()
    done = finished(states)
    screen.say(
        f"{len(done)} of {len(plan.runs)} runs are done, in a total of"
        f" {duration(sum(state.total_s for state in done))}; records: {plan.directory}"
    )
    failed = [state.run.name for state in states if state.status == "failed"]
    if failed:
        screen.say(
            f"failed: {', '.join(failed)}; their output is in study.log beside their records"
        )
    if undone := [state for state in states if state.status not in ("ok", "failed")]:
        names = ", ".join(f"{state.run.name} ({state.status})" for state in undone)
        screen.say(f"not done: {names}")
    if len(done) < len(plan.runs):
        raise click.exceptions.Exit(1)


@command.command("status", cls=Command, examples=["candle-p1 study status strong-nt3"])
@click.argument("name", metavar="NAME|DIRECTORY", shell_complete=complete_study)
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


def _plan(
    name: str,
    size: str | None,
    output: Path,
    ranks: list[int] | None,
    repeats: int | None,
    seed: int | None,
    flags: tuple[str, ...],
) -> Plan:
    return make_plan(find_study(name), Choice(size, ranks, repeats, seed, list(flags)), output)


def _show(plan: Plan) -> None:
    show_plan(plan, states_of(plan.runs), Screen())
