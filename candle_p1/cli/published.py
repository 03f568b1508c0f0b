"""candle-p1 published: what the paper states, and its Table 1 beside what is trained here."""

from __future__ import annotations

from pathlib import Path

import click

from candle_p1.cli.base import Command, complete_benchmark, json_option, write_json


@click.command(
    "published",
    cls=Command,
    examples=["candle-p1 published nt3", "candle-p1 published --csv"],
)
@click.argument("benchmark", required=False, shell_complete=complete_benchmark)
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print CSV instead, with all fields of the values."
)
@json_option("all fields of the values, and Table 1,")
def command(benchmark: str | None, as_csv: bool, json_file: Path | None) -> None:
    """Show the published values that reports compare with, and where they were published.

    These are the values for BENCHMARK, by default for all of them. The paper's Table 1 is shown
    beside what CANDLE's parameter files say, and what is trained here by default.
    """
    from candle_p1.bench.published import collect, render, to_csv
    from candle_p1.training.screen import Screen

    report = collect(benchmark)
    if as_csv:
        click.echo(to_csv(report), nl=False)
    else:
        screen = Screen()
        for part in render(report):
            screen.say(part)
    write_json(json_file, report)
