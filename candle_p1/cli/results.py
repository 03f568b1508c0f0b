"""Commands about runs, made from their records: show, report, compare, model, forecast, published.

Their imports are inside of functions: pandas and matplotlib take a second to import.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from candle_p1.cli import base
from candle_p1.errors import ModelError, ParameterError
from candle_p1.files import write_atomically
from candle_p1.records.record import RECORD_NAME, read_record
from candle_p1.text import count
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from rich.table import Table

    from candle_p1.reports.frame import Run

MODES = ("strong", "weak", "batch")

runs_argument = click.argument(
    "directories", metavar="DIR...", nargs=-1, required=True, type=base.PATH
)
comm_option = base.option(
    "--comm", "JSON file of `bench comm`, with latency and bandwidth.", base.PATH
)


@click.command(
    "show",
    cls=base.Command,
    examples=["candle-p1 show output", "candle-p1 show output/nt3/EXP000/RUN000 --html run.html"],
)
@click.argument("record", metavar="[DIR]", type=base.PATH, default="output")
@base.option("--full", "Also show phases, epochs, communication and energy.", is_flag=True)
@base.file_option("--html", "Write a page with plots of phases, power and loss to this file.")
@base.file_option("--picture", "Write the plot of phases and power to this file, as SVG.")
def show_command(record: Path, full: bool, html: Path | None, picture: Path | None) -> None:
    """Show a run: what ran where, how good the model is, how long it took, and why.

    DIR is the directory of the run, or its run.json. If there are several runs below DIR (by
    default "output"), they are listed.
    """
    from candle_p1.records.summary import details, summary
    from candle_p1.reports.over_time import phases_svg
    from candle_p1.reports.render import render_page
    from candle_p1.reports.report import run_page

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
    if html:
        write_atomically(html, render_page(run_page(runs[0])))
        screen.say(f"html: {html}")
    if picture:
        write_atomically(picture, phases_svg(runs[0]))
        screen.say(f"picture: {picture}")


def _runs(path: Path, screen: Screen) -> Sequence[Run]:
    """Returns the run in a directory, or else those below it, in the order of their starts."""
    from candle_p1.reports.frame import Run

    if path.is_dir() and not (path / RECORD_NAME).exists():
        found = base.read_runs([path], screen)
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


@click.command("report", cls=base.Command, examples=["candle-p1 report output -o report"])
@runs_argument
@base.option(
    "-o --out",
    "The directory to write: index.html, which needs no other file, figures/ and tables/.",
    base.DIRECTORY,
    required=True,
)
@base.option(
    "--model",
    "Also fit a model to each series, as `candle-p1 model` does; this takes time.",
    is_flag=True,
)
def report_command(directories: tuple[Path, ...], out: Path, model: bool) -> None:
    """Report on all runs in or below each DIR, beside the values that the paper prints.

    The report is made from the records alone: times, speed-ups and improvements with their
    intervals, accuracy, energy where it was measured, what dominates and what to change.
    """
    from candle_p1.reports.render import write_page
    from candle_p1.reports.report import make_report

    screen = Screen()
    runs = base.read_runs(directories, screen)
    page, exports = make_report(runs, screen.say, with_model=model)
    path = write_page(page, out, exports)
    num_figures = sum(len(section.figures) for section in page.all_sections)
    screen.say(f"{path}: {count(len(runs.runs), 'run')}, {count(num_figures, 'figure')}")


@click.command(
    "compare",
    cls=base.Command,
    examples=["candle-p1 compare output/nt3/EXP000/RUN000 output/nt3/EXP000/RUN001"],
)
@click.argument("a", type=base.PATH)
@click.argument("b", type=base.PATH)
@base.json_option("the comparison, with the values of all runs,")
def compare_command(a: Path, b: Path, json_file: Path | None) -> None:
    """Compare A and B: times of all phases, energy and quality, and list all differences.

    Each is a run.json, or a directory, which stands for all runs in or below it. A difference is
    claimed where the 95 % interval of the ratio excludes 1, which requires 4 runs on each side.
    """
    from candle_p1.reports.compare import Side, compare

    screen = Screen()
    comparison = compare(*(Side(str(path), base.read_runs([path], screen).runs) for path in (a, b)))
    for part in comparison.render():
        screen.say(part if isinstance(part, str) else part.to_rich())
    base.write_json(json_file, comparison.to_dict())


@click.command(
    "model",
    cls=base.Command,
    examples=[
        "candle-p1 model output",
        "candle-p1 model output --hold_out 4",
        "candle-p1 model output --comm comm.json -o model",
    ],
)
@runs_argument
@comm_option
@base.option(
    "--hold_out",
    "Numbers of ranks whose runs are held out, and compared with what the model predicts.",
    base.NumberList(),
    name="held_out",
)
@base.option(
    "-o --out",
    "Directory for index.html, which needs no other file, model.json, figures/ and tables/.",
    base.DIRECTORY,
)
@base.json_option("the models (parameters with intervals, residuals)")
def model_command(
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

    screen = Screen()
    runs = base.read_runs(directories, screen).runs
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
    base.write_json(json_file, content)
    if out:
        path = write_page(page, out, {"model.json": base.as_json(content)})
        num_models = sum(len(section["series"]) for section in content["sections"])
        screen.say(f"{path}: {count(len(runs), 'run')}, {num_models} modelled series")


@click.command(
    "forecast",
    cls=base.Command,
    examples=[
        "candle-p1 forecast nt3 --machine summit --ranks 384,3072",
        "candle-p1 forecast nt3 --ranks 8,16 --from output",
        "candle-p1 forecast nt3 --machine summit --ranks 3072 --mode weak --set network=2",
    ],
)
@click.argument("benchmark")
@base.option(
    "--machine",
    "With --from, the machine whose number of ranks per node is used; by default that of the"
    " runs. Without --from, it must be summit, and the paper's values are used.",
    shell_complete=base.complete_machine,
)
@base.option("--ranks", "Numbers of ranks.", base.NumberList(10**6), required=True)
@base.option(
    "--from",
    "A directory of runs to predict from; may be repeated.",
    base.PATH,
    name="directories",
    multiple=True,
)
@base.option("--mode", "The mode of scaling; by default all for which there are data.", MODES)
@comm_option
@base.option(
    "--set",
    "What if: file_system or network (faster by this factor), epochs, epochs_per_rank or"
    " batch_size; may be repeated.",
    name="changes",
    multiple=True,
    metavar="NAME=VALUE",
)
@base.json_option("the forecasts")
def forecast_command(
    benchmark: str,
    machine: str | None,
    ranks: list[int],
    directories: tuple[Path, ...],
    mode: str | None,
    comm: Path | None,
    changes: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Forecast time, energy, scaling efficiency and the gain of each loader at other scales.

    Also shows the largest scale with a scaling efficiency of at least 70 % and the numbers of ranks
    with the least energy and the least product of energy and time. All have intervals. Without
    --from, the forecast is made from the paper's printed values, beside the gains that it prints.
    """
    from candle_p1.cluster.machine import load_machine
    from candle_p1.modelling.communication import measured_for
    from candle_p1.modelling.forecast import Changes
    from candle_p1.reports import forecasts

    screen, modes = Screen(), (mode,) if mode else MODES
    asked: Any = (benchmark, modes, sorted(ranks), Changes.parse(changes))
    if directories:
        per_node = (load_machine(machine).ranks_per_node or None) if machine else None
        runs = base.read_runs(directories, screen).runs
        allreduce_s = measured_for(comm, [r.record for r in runs]).allreduce_s if comm else None
        found = forecasts.forecast_runs(runs, *(*asked, per_node, allreduce_s))
        if per_node:
            said = f"--machine {machine}: {per_node} ranks on each node"
            screen.say(f"{said}; rates and powers are still those of the machine of the runs")
    elif comm or machine != "summit" or mode == "batch":
        given = f"--machine {machine}: " if machine else ""
        raise ModelError(
            f"{given}give runs with --from DIR, or use the paper's values: --machine summit,"
            " without --comm and --mode batch"
        )
    else:
        found = forecasts.forecast_paper(*asked)
    for each in found:
        for table in forecasts.forecast_tables(each):
            screen.say(table.to_rich())
        for line in (*each["published"], *each["notes"]):
            screen.say(line)
    base.write_json(json_file, found)


@click.command(
    "published",
    cls=base.Command,
    examples=["candle-p1 published nt3", "candle-p1 published --csv"],
)
@click.argument("benchmark", required=False, shell_complete=base.complete_benchmark)
@base.option(
    "--csv", "Print CSV instead, with all fields of the values.", name="as_csv", is_flag=True
)
@base.json_option("all fields of the values, and Table 1,")
def published_command(benchmark: str | None, as_csv: bool, json_file: Path | None) -> None:
    """Show the published values that reports compare with, and where they were published.

    These are the values for BENCHMARK, by default for all of them. The paper's Table 1 is shown
    beside what CANDLE's parameter files say, and what is trained here by default.
    """
    from candle_p1.bench.published import collect, render, to_csv

    report = collect(benchmark)
    if as_csv:
        click.echo(to_csv(report), nl=False)
    else:
        for part in render(report):
            Screen().say(part)
    base.write_json(json_file, report)
