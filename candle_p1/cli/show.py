"""candle-p1 show: one run, in full."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from candle_p1.files import write_atomically
from candle_p1.records.record import RECORD_NAME, read_record

WIDTH = 120
"""The width of output that is not written to a terminal."""


@click.command("show")
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page to this file, with a picture of phases and power; it needs no other file.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the picture to this file, as SVG.",
)
def command(record: Path, html: Path | None, picture: Path | None) -> None:
    """Show a run: its phases, epochs, communication, efficiency and energy.

    RECORD is a run's run.json, or the directory that holds it.
    """
    from rich.console import Console

    from candle_p1.records.summary import details
    from candle_p1.reports.figures.power import power_svg
    from candle_p1.reports.runs import RecordedRun
    from candle_p1.reports.writing import run_page

    path = record / RECORD_NAME if record.is_dir() else record
    run = RecordedRun(path, read_record(path))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for part in details(run.record):
        console.print(part, markup=False, soft_wrap=isinstance(part, str))
    if html:
        write_atomically(html, run_page(run))
        click.echo(f"page: {html}")
    if picture:
        write_atomically(picture, power_svg(run))
        click.echo(f"picture: {picture}")
