"""candle-p1 model: time and energy of some runs as a function of ranks, batch size and epochs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from candle_p1.cli.base import Command, write_output
from candle_p1.text import count


@click.command(
    "model",
    cls=Command,
    examples=[
        "candle-p1 model output",
        "candle-p1 model output --hold_out 4",
        "candle-p1 model output --comm comm.json -o model",
    ],
)
@click.argument(
    "directories", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--comm",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A measurement of communication, from bench comm; gives latency and bandwidth.",
)
@click.option(
    "--hold_out",
    "held_out",
    help="Numbers of ranks whose runs are not used, but compared with what is predicted for them.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory to write: index.html, which needs no other file, model.json, figures/"
    " and tables/.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the models to this file: parameters with intervals, residuals.",
)
def command(
    directories: tuple[Path, ...],
    comm: Path | None,
    held_out: str | None,
    out: Path | None,
    json_path: Path | None,
) -> None:
    """Model the time and the energy of all runs in or below each DIR.

    Each phase of a series of runs is fitted by a law with few parameters: loading by bytes and
    rates, computing by samples, exposed communication by the bytes of the gradients. Parameters
    and predictions have intervals, from a bootstrap over runs; bad fits are named.
    """
    from candle_p1.modelling.communication import measured_for
    from candle_p1.modelling.forecast import parse_ranks
    from candle_p1.reports.model_page import make_model_report, write_model_report
    from candle_p1.reports.runs import read_runs
    from candle_p1.training.screen import Screen

    screen = Screen()
    runs = read_runs(directories)
    for record, reason in runs.problems.items():
        screen.warn(f"{record}: {reason}")
    ranks = parse_ranks(held_out, "--hold_out") if held_out else []
    communication = measured_for(comm, [run.record for run in runs.runs]) if comm else None
    report = make_model_report(runs, communication, ranks, draws=out is not None)
    for note in report.notes:
        screen.say(note)
    for section in report.sections:
        screen.say(f"\n{section.title}")
        for note in section.notes:
            screen.say(note)
        for name, reason in section.missing:
            screen.say(f"{name}: {reason}")
        for table in section.tables:
            screen.say(table.to_rich())
    if json_path:
        content = json.dumps(report.to_dict(), indent=2, allow_nan=False)
        write_output("--json", json_path, content + "\n")
        screen.say(f"models: {json_path}")
    if out:
        page = write_model_report(report, out)
        num_models = sum(len(section.modelled) for section in report.sections)
        screen.say(f"{page}: {count(len(runs.runs), 'run')}, {num_models} modelled series")
