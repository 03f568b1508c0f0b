"""candle-p1 compare: two runs, or two sets of runs, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click

from candle_p1.cli.base import Command, write_output


@click.command(
    "compare",
    cls=Command,
    examples=["candle-p1 compare output/nt3/EXP000/RUN000 output/nt3/EXP000/RUN001"],
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the comparison to this file, with the values of all runs.",
)
def command(a: Path, b: Path, json_path: Path | None) -> None:
    """Compare A and B: times of all phases, energy and quality, and list all differences.

    Each is a run.json, or a directory, which stands for all runs in or below it. A difference is
    claimed where the 95 % interval of the ratio excludes 1, which takes 4 runs against 4.
    """
    from candle_p1.reports.compare import compare
    from candle_p1.reports.compare_show import tables
    from candle_p1.reports.runs import read_runs
    from candle_p1.reports.sides import Side
    from candle_p1.training.screen import Screen

    screen, sides = Screen(), []
    for path in (a, b):
        runs = read_runs([path])
        for record, reason in runs.problems.items():
            screen.warn(f"{record}: {reason}")
        sides.append(Side(str(path), runs.runs))
    comparison = compare(*sides)
    for part in tables(comparison):
        screen.say(part)
    if json_path:
        text = json.dumps(comparison.to_dict(), indent=2, allow_nan=False)
        write_output("--json", json_path, text + "\n")
        screen.say(f"comparison: {json_path}")
