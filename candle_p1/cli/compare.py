"""candle-p1 compare: two runs, or two sets of runs, side by side."""

from __future__ import annotations

from pathlib import Path

import click

from candle_p1.cli.base import Command, json_option, read_runs, write_json


@click.command(
    "compare",
    cls=Command,
    examples=["candle-p1 compare output/nt3/EXP000/RUN000 output/nt3/EXP000/RUN001"],
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@json_option("the comparison, with the values of all runs,")
def command(a: Path, b: Path, json_file: Path | None) -> None:
    """Compare A and B: times of all phases, energy and quality, and list all differences.

    Each is a run.json, or a directory, which stands for all runs in or below it. A difference is
    claimed where the 95 % interval of the ratio excludes 1, which requires 4 runs on each side.
    """
    from candle_p1.reports.compare import Side, compare
    from candle_p1.training.screen import Screen

    screen = Screen()
    comparison = compare(*(Side(str(path), read_runs([path], screen).runs) for path in (a, b)))
    for part in comparison.render():
        screen.say(part if isinstance(part, str) else part.to_rich())
    write_json(json_file, comparison.to_dict())
