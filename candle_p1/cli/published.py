"""candle-p1 published: what the paper states, and its Table 1 beside what is trained here."""

from __future__ import annotations

import json

import click

from candle_p1.cli.base import Command, complete_benchmark
from candle_p1.errors import ParameterError


@click.command(
    "published",
    cls=Command,
    examples=["candle-p1 published nt3", "candle-p1 published --csv"],
)
@click.argument("benchmark", required=False, shell_complete=complete_benchmark)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with all fields of the values.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all fields, and Table 1.")
def command(benchmark: str | None, as_csv: bool, as_json: bool) -> None:
    """Show the published values that reports compare with, each with its place.

    They are about BENCHMARK, or by default about all of them. The paper's Table 1 is shown beside
    what CANDLE's parameter files say, and what is trained here by default.
    """
    from candle_p1.bench.published import collect, parts, to_csv
    from candle_p1.training.screen import Screen

    if as_csv and as_json:
        raise ParameterError("--csv and --json are two formats: give only one of them")
    report = collect(benchmark)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    elif as_csv:
        click.echo(to_csv(report), nl=False)
    else:
        screen = Screen()
        for part in parts(report):
            screen.say(part)
