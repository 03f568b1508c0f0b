"""candle-p1 report: a page with figures and tables of some runs."""

from __future__ import annotations

from pathlib import Path

import click

from candle_p1.cli.base import Command, read_runs
from candle_p1.text import count


@click.command("report", cls=Command, examples=["candle-p1 report output -o report"])
@click.argument(
    "directories", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory to write: index.html, which needs no other file, figures/ and tables/.",
)
@click.option(
    "--model",
    is_flag=True,
    help="Fit a model to each series, too, as `candle-p1 model` does; this takes time.",
)
def command(directories: tuple[Path, ...], out: Path, model: bool) -> None:
    """Report on all runs in or below each DIR, beside the values that the paper prints.

    The report is made from the records alone: times, speed-ups and improvements with their
    intervals, accuracy, energy where it was measured, what dominates and what to change.
    """
    from candle_p1.reports.render import write_page
    from candle_p1.reports.report import make_report
    from candle_p1.training.screen import Screen

    screen = Screen()
    runs = read_runs(directories, screen)
    page, exports = make_report(runs, screen.say, with_model=model)
    path = write_page(page, out, exports)
    num_figures = sum(len(section.figures) for section in page.all_sections)
    screen.say(f"{path}: {count(len(runs.runs), 'run')}, {count(num_figures, 'figure')}")
