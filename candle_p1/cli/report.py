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
def command(directories: tuple[Path, ...], out: Path) -> None:
    """Report on all runs in or below each DIR, beside the values that the paper prints.

    The report is made from the records alone: times, speed-ups and improvements with their
    intervals, accuracy, energy where it was measured, what dominates and what to change.
    """
    from candle_p1.reports.report import make_report
    from candle_p1.reports.writing import write_report
    from candle_p1.training.screen import Screen

    screen = Screen()
    runs = read_runs(directories, screen)
    report = make_report(runs, screen.say)
    page = write_report(report, out)
    num_figures = sum(len(section.figures) for section in report.sections)
    screen.say(f"{page}: {count(len(runs.runs), 'run')}, {count(num_figures, 'figure')}")
