"""candle-p1 study: performs sweeps, and goes on with those that were interrupted."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from candle_p1.errors import ParameterError
from candle_p1.studies.places import OUTPUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.studies.plan import Plan

WIDTH = 120
"""Columns of output that goes to no terminal."""

_output = click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=OUTPUT,
    show_default=True,
    help="Directory for results, which go to STUDY-SIZE in it.",
)
_size = click.option("--size", help="Size of the study: small or paper; by default its first one.")


def _choices(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that `show` and `run` have in common."""
    for option in (
        click.argument("flags", nargs=-1, type=click.UNPROCESSED),
        click.option("--seed", type=click.IntRange(min=0), help="Seed of the order of the runs."),
        click.option("--repeats", type=click.IntRange(min=1), help="Runs of each point."),
        click.option("--ranks", metavar="N,N,...", help="Numbers of ranks."),
        _output,
        _size,
        click.argument("name"),
    ):
        function = option(function)
    return function


@click.group("study")
def command() -> None:
    """Sweeps over ranks and parameters: performed unattended, resumed, nothing run twice."""


@command.command("list")
def list_command() -> None:
    """List the studies that are here, with what of the paper they repeat."""
    from candle_p1.studies.library import find_study, list_studies

    for name in list_studies():
        study = find_study(name)
        shows = f" ({', '.join(study.shows)})" if study.shows else ""
        click.echo(f"{name}: {study.title}{shows}; {', '.join(study.sizes)}")


@command.command("show")
@_choices
def show_command(**chosen: Any) -> None:
    """Show the runs of study NAME (or FILE.toml), their order, and what they will take.

    Flags after "--" go to the benchmark in all runs.
    """
    _show(_plan(**chosen))


@command.command("run")
@_choices
@click.option("--dry-run", is_flag=True, help="Show the runs and start nothing.")
@click.option("--retry-failed", is_flag=True, help="Repeat runs that failed before.")
def run_command(dry_run: bool, retry_failed: bool, **chosen: Any) -> None:
    """Perform study NAME (or FILE.toml) on this machine, or go on with it.

    Runs that are done are not repeated. Flags after "--" go to the benchmark in all runs:
    candle-p1 study run strong-nt3 -- --data_dir DIR. Ends with code 1 unless all runs are done.
    """
    from candle_p1.studies.execute import Execution
    from candle_p1.studies.process import Interrupted
    from candle_p1.studies.screen import StudyScreen
    from candle_p1.studies.show import spent

    plan = _plan(**chosen)
    if dry_run:
        _show(plan)
        return
    screen = StudyScreen()
    screen.say(f"{plan.study.name}, {plan.size}: {plan.study.title}")
    execution = Execution(plan, screen, retry_failed)
    try:
        execution.perform()
    except Interrupted as interrupted:
        done = f"{execution.num_done} of {len(plan.runs)} runs are done"
        again = shlex.join(["candle-p1", *sys.argv[1:]])
        screen.say(f"interrupted; {done}, and the same command goes on: {again}")
        raise click.exceptions.Exit(128 + interrupted.number) from None
    finally:
        screen.close()
    screen.say(
        f"{execution.num_done} of {len(plan.runs)} runs are done, which took"
        f" {spent(execution.states)}; records: {plan.directory}"
    )
    if execution.failed:
        names = ", ".join(state.run.name for state in execution.failed)
        screen.say(f"failed: {names}; what they printed is in study.log beside their records")
    if execution.undone:
        names = ", ".join(f"{state.run.name} ({state.status})" for state in execution.undone)
        screen.say(f"not done: {names}")
    if execution.num_done < len(plan.runs):
        raise click.exceptions.Exit(1)


@command.command("status")
@click.argument("name", metavar="NAME|DIRECTORY")
@_size
@_output
def status_command(name: str, size: str | None, output: Path) -> None:
    """Show how far study NAME is, or the one in DIRECTORY."""
    from rich.console import Console

    from candle_p1.studies.library import find_study
    from candle_p1.studies.manifest import read_kept
    from candle_p1.studies.show import status_parts
    from candle_p1.studies.state import states_of

    directory = Path(name)
    if not directory.is_dir():
        study = find_study(name)
        directory = output / f"{study.name}-{study.size(size)[0]}"
    plan = read_kept(directory)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for part in status_parts(plan, states_of(plan.runs)):
        if isinstance(part, str):
            console.print(part, markup=False, soft_wrap=True)
        else:
            console.print(part)


def _plan(
    name: str,
    size: str | None,
    output: Path,
    ranks: str | None,
    repeats: int | None,
    seed: int | None,
    flags: tuple[str, ...],
) -> Plan:
    from candle_p1.studies.library import find_study
    from candle_p1.studies.plan import Choice, make_plan

    numbers = None if ranks is None else read_ranks(ranks)
    return make_plan(find_study(name), Choice(size, numbers, repeats, seed, list(flags)), output)


def read_ranks(text: str, option: str = "--ranks") -> list[int]:
    """Returns numbers of ranks, ascending, from "1,2,4".

    Raises:
        ParameterError: They are none.
    """
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ParameterError(f"{option} {text}: give numbers above 0 with commas between them")
    return sorted({int(number) for number in text.split(",")})


def _show(plan: Plan) -> None:
    from candle_p1.studies.show import plan_lines
    from candle_p1.studies.state import states_of

    for line in plan_lines(plan, states_of(plan.runs)):
        click.echo(line)
