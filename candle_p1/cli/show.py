"""candle-p1 show: one run, or a list of runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from candle_p1.cli.base import Command, file_option, read_runs
from candle_p1.errors import ParameterError
from candle_p1.files import write_atomically
from candle_p1.records.record import RECORD_NAME, read_record
from candle_p1.text import count

if TYPE_CHECKING:
    from rich.table import Table

    from candle_p1.reports.frame import Run
    from candle_p1.training.screen import Screen


@click.command(
    "show",
    cls=Command,
    examples=["candle-p1 show output", "candle-p1 show output/nt3/EXP000/RUN000 --html run.html"],
)
@click.argument("record", metavar="[DIR]", type=click.Path(path_type=Path), default="output")
@click.option("--full", is_flag=True, help="Show phases, epochs, communication and energy, too.")
@file_option("--html", "html", "Write a page with pictures of phases, power and loss to this file.")
@file_option("--picture", "picture", "Write the picture of phases and power to this file, as SVG.")
def command(record: Path, full: bool, html: Path | None, picture: Path | None) -> None:
    """Show a run: what ran where, how good the model is, how long it took, and why.

    DIR is the directory of the run, or its run.json. If there are several runs below DIR (by
    default "output"), they are listed.
    """
    from candle_p1.records.summary import details, summary
    from candle_p1.reports.figures.time import phases_svg
    from candle_p1.reports.render import render_page
    from candle_p1.reports.report import run_page
    from candle_p1.training.screen import Screen

    screen = Screen()
    runs = _runs(record, screen)
    if len(runs) != 1:
        if html or picture:
            raise ParameterError(f"{record} holds {count(len(runs), 'run')}: name one of them")
        screen.say(_table(runs, record))
        newest = os.path.relpath(runs[-1].path.parent)
        screen.say_command(["candle-p1", "show", newest], "to show one: ")
        return
    for part in details(runs[0].record) if full else summary(runs[0].record):
        screen.say(part)
    if not full:
        screen.say_command(["candle-p1", "show", str(record), "--full"], "more: ")

    def page(run: Run) -> str:
        return render_page(run_page(run))

    for flag, path, make in (("--html", html, page), ("--picture", picture, phases_svg)):
        if path:
            write_atomically(path, make(runs[0]))
            screen.say(f"{flag.lstrip('-')}: {path}")


def _runs(path: Path, screen: Screen) -> Sequence[Run]:
    """Returns the run in a directory, or else those below it, in the order of their starts."""
    from candle_p1.reports.frame import Run

    if path.is_dir() and not (path / RECORD_NAME).exists():
        found = read_runs([path], screen)
        if found.runs:
            return found.runs
        path = next(iter(found.problems))
    path = path / RECORD_NAME if path.is_dir() else path
    return [Run(path, read_record(path))]


def _table(runs: Sequence[Run], directory: Path) -> Table:
    from rich.table import Table

    table = Table("run", "benchmark", "status", title=f"{directory}: {count(len(runs), 'run')}")
    table.add_column("ranks", justify="right")
    table.add_column("total (s)", justify="right")
    table.add_column("started (UTC)")
    for run in runs:
        segments, total_s = run["num_segments"], run["total_s"]
        table.add_row(
            os.path.relpath(run.path.parent, directory.resolve()),
            run["benchmark"],
            run["status"] + (f", {count(segments, 'segment')}" if segments > 1 else ""),
            str(run["num_ranks"]),
            "" if total_s is None else f"{total_s:.1f}",
            run.record.started[:19].replace("T", " "),
        )
    return table
