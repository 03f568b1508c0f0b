"""candle-p1 bench: measured comparisons, beside what the paper published."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from candle_p1.errors import ParameterError
from candle_p1.files import write_atomically
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rich.table import Table

    from candle_p1.bench.measurement import Measurement


_size = click.option(
    "--size",
    type=click.Choice(["small", "full"]),
    help="Take synthetic files of this size; small by default.",
)
_data_dir = click.option(
    "--data_dir", metavar="DIRECTORY", help="Take the files there, under CANDLE's names."
)
_json = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results and all raw values to this file.",
)


@click.group("bench")
def command() -> None:
    """Measure and compare: data loaders, training steps, and the overhead of measuring."""


@command.command("load")
@click.argument("benchmark")
@_size
@_data_dir
@click.option(
    "--methods",
    metavar="NAME,NAME,...",
    help="The loaders to compare; by default all that are installed.",
)
@click.option(
    "--np",
    "num_ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of ranks that load at once, each as it would in a run.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Threads of each rank, for loaders that have threads; 0 is its share of the cores.",
)
@click.option(
    "--repeats",
    "num_repeats",
    type=click.IntRange(min=1),
    default=6,
    show_default=True,
    help="Timed loads of each method; 6 are the fewest that give a 95 % interval of the median.",
)
@click.option(
    "--file_cache",
    type=click.Choice(["warm", "cold"]),
    default="warm",
    show_default=True,
    help="Read the files once before every load, or drop them from the file cache.",
)
@_json
@click.option(
    "--picture",
    "picture_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the times into this PNG file.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def load_command(
    benchmark: str,
    size: str | None,
    data_dir: str | None,
    methods: str | None,
    json_file: Path | None,
    picture_file: Path | None,
    flags: tuple[str, ...],
    **conditions: Any,
) -> None:
    """Compare the ways to load BENCHMARK's files, as the paper's Tables 3 and 4 do.

    Every load is a job of its own. Memory is measured in one that is not timed. All methods must
    read the same values.

    Flags after "--" go to the benchmark: candle-p1 bench load p1b3 -- --drug_features all.
    """
    from candle_p1.bench import show
    from candle_p1.bench.load import Comparison, choose_methods

    _check_directories({"--json": json_file, "--picture": picture_file})
    words = [*_data_flags(size, data_dir), *flags]
    report = _measure(Comparison(benchmark, words, methods=choose_methods(methods), **conditions))
    _print(show.parts(report))
    _write(report, json_file)
    if picture_file:
        show.picture(report, picture_file)
        Screen().say(f"picture: {picture_file}")


@command.command("step")
@click.argument("benchmark")
@_size
@_data_dir
@click.option(
    "--np",
    "num_ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of ranks that train, on this machine.",
)
@click.option(
    "--against",
    type=click.Choice(["plain", "none"]),
    default="plain",
    show_default=True,
    help="Compare with plain Keras, or, where there are several ranks, with one process and with"
    " ranks that do not exchange gradients; or with nothing.",
)
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Timed steps of a job, after some that are not.",
)
@click.option(
    "--rounds",
    "num_rounds",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Jobs of each form. Six steps are the fewest that give a 95 % interval of the median.",
)
@_json
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def step_command(
    benchmark: str,
    size: str | None,
    data_dir: str | None,
    against: str,
    json_file: Path | None,
    flags: tuple[str, ...],
    **conditions: Any,
) -> None:
    """Compare BENCHMARK's training step, as a run has it, with plain Keras and with its floor.

    The floor is what matrix products and the optimizer's memory traffic take at the rates that this
    machine reaches, measured in the same job.

    Flags after "--" go to the benchmark: candle-p1 bench step nt3 -- --batch_size 40.
    """
    from candle_p1.bench import show_step
    from candle_p1.bench.step import StepComparison

    _check_directories({"--json": json_file})
    words = [*_data_flags(size, data_dir), *flags]
    report = _measure(StepComparison(benchmark, words, against=against == "plain", **conditions))
    _print(show_step.parts(report))
    _write(report, json_file)


@command.command("overhead")
@click.argument("benchmark")
@_size
@_data_dir
@click.option(
    "--np",
    "num_ranks",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of ranks that train, on this machine.",
)
@click.option(
    "--epochs",
    "num_epochs",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Epochs of a stretch.",
)
@click.option(
    "--rounds",
    "num_rounds",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    help="Rounds of one stretch with measuring and one without.",
)
@_json
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def overhead_command(
    benchmark: str,
    size: str | None,
    data_dir: str | None,
    json_file: Path | None,
    flags: tuple[str, ...],
    **conditions: Any,
) -> None:
    """Find what a run's own measuring costs: phases, steps, and the log of communication.

    Two models of BENCHMARK train in turn in one job, one measured and one not.

    Flags after "--" go to the benchmark: candle-p1 bench overhead nt3 -- --batch_size 40.
    """
    from candle_p1.bench.overhead import OverheadMeasurement, lines

    _check_directories({"--json": json_file})
    words = [*_data_flags(size, data_dir), *flags]
    report = _measure(OverheadMeasurement(benchmark, words, **conditions))
    _print(lines(report))
    _write(report, json_file)


@command.command("record")
@click.option("--ranks", "num_ranks", type=click.IntRange(min=1), default=3072, show_default=True)
@click.option("--epochs", "num_epochs", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--records",
    "num_records",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of records that the report is made from.",
)
@_json
def record_command(json_file: Path | None, **conditions: int) -> None:
    """Measure the size of a record of many ranks, and the time to write, read and report it.

    The records are synthetic; nothing is trained.
    """
    from candle_p1.bench.record import RecordMeasurement, lines

    _check_directories({"--json": json_file})
    results = RecordMeasurement(**conditions).measure()
    _print(lines(results))
    _write(results, json_file)


def _data_flags(size: str | None, data_dir: str | None) -> list[str]:
    """Returns the benchmark's flags for the data of a comparison."""
    if size and data_dir:
        raise ParameterError("--size is of synthetic files and --data_dir names others: give one")
    named = [("--size", size), ("--data_dir", data_dir)]
    return [word for flag, value in named if value for word in (flag, value)]


def _check_directories(paths: Mapping[str, Path | None]) -> None:
    for option, path in paths.items():
        if path and not os.access(path.absolute().parent, os.W_OK):
            raise ParameterError(f"{option} {path}: there is no directory to write it to")


def _measure(comparison: Measurement) -> dict[str, Any]:
    """Makes the data where they are missing, and measures."""
    screen = Screen()
    with screen.making_data() as making:
        files = comparison.locate_files(making)
    for note in comparison.notes:
        screen.say(f"note: {note}")
    with _ended_by_signals(), _progress() as starting:
        return comparison.measure(files, starting)


def _write(report: Mapping[str, Any], json_file: Path | None) -> None:
    if json_file:
        write_atomically(json_file, json.dumps(report, indent=2, allow_nan=False) + "\n")
        Screen().say(f"results: {json_file}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Unwinds after SIGTERM and SIGHUP as after Ctrl-C, which ends the jobs under way."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Gives a function (jobs done, all jobs, what comes) that shows a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(highlight=False)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = progress.add_task("", total=None)
    with progress:
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, description=what
        )


def _print(parts: Iterable[str | Table]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))
