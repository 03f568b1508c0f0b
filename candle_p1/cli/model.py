"""candle-p1 model: time and energy of some runs as a function of ranks, batch size and epochs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from candle_p1.cli.base import Command, NumberList, json_option, read_runs, write_json
from candle_p1.text import count

PATH = click.Path(path_type=Path)
comm_option = click.option(
    "--comm", type=PATH, help="JSON file of bench comm, with latency and bandwidth."
)


@click.command(
    "model",
    cls=Command,
    examples=[
        "candle-p1 model output",
        "candle-p1 model output --hold_out 4",
        "candle-p1 model output --comm comm.json -o model",
    ],
)
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=PATH)
@comm_option
@click.option(
    "--hold_out",
    "held_out",
    type=NumberList(),
    help="Numbers of ranks whose runs are held out, and compared with what the model predicts.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for index.html, which needs no other file, model.json, figures/ and tables/.",
)
@json_option("the models (parameters with intervals, residuals)")
def command(
    directories: tuple[Path, ...],
    comm: Path | None,
    held_out: list[int] | None,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """Model the time and the energy of all runs in or below each DIR.

    Each phase of a series of runs is fitted by a law with few parameters: loading by bytes and
    rates, computing by samples, exposed communication by the bytes of the gradients. Parameters
    and predictions have intervals, from a bootstrap over runs; bad fits are named.
    """
    from candle_p1.modelling.communication import measured_for
    from candle_p1.reports.model_page import model_page
    from candle_p1.reports.render import write_page
    from candle_p1.training.screen import Screen

    screen = Screen()
    runs = read_runs(directories, screen).runs
    measured = measured_for(comm, [run.record for run in runs]) if comm else None
    page, content = model_page(runs, measured, held_out or (), draws=out is not None)
    for note in page.notes:
        screen.say(note)
    for section in page.sections:
        missing = (f"{name}: {reason}" for name, reason in section.missing)
        for line in (f"\n{section.title}", *section.notes, *missing):
            screen.say(line)
        for table in section.tables:
            screen.say(table.to_rich())
    write_json(json_file, content)
    if out:
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        path = write_page(page, out, {"model.json": text})
        num_models = sum(len(section["series"]) for section in content["sections"])
        screen.say(f"{path}: {count(len(runs), 'run')}, {num_models} modelled series")
