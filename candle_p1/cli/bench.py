"""candle-p1 bench: measured comparisons, shown beside what the paper published."""

from __future__ import annotations

import json
import os
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

_file = click.Path(dir_okay=False, path_type=Path)
_json = click.option("--json", "json_file", type=_file, help="Write all results to this file.")


def _count(flag: str, name: str, default: int, text: str) -> Callable[..., Any]:
    """Returns an option that takes a positive integer."""
    positive = click.IntRange(min=1)
    return click.option(flag, name, type=positive, default=default, show_default=True, help=text)


def _options(*own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a decorator that adds the arguments and options of all measurements, and own ones."""
    sizes = click.Choice(["small", "full"])
    shared = (
        click.argument("benchmark"),
        click.option(
            "--size", type=sizes, help="Use synthetic files of this size (default: small)."
        ),
        click.option("--data_dir", metavar="DIR", help="Use CANDLE's files in this directory."),
        *own,
        _json,
        click.argument("flags", nargs=-1, type=click.UNPROCESSED),
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(shared):
            function = option(function)
        return function

    return decorate


@click.group("bench")
def command() -> None:
    """Measure and compare: data loaders, training steps, and the overhead of measuring."""


@command.command("load")
@_options(
    click.option(
        "--methods",
        metavar="NAME,NAME,...",
        help="The loaders to compare; by default all that are installed.",
    ),
    _count("--np", "num_ranks", 1, "Number of ranks, which load at the same time as in a run."),
    click.option(
        "--threads",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Threads of each rank, for loaders that use threads; 0 is its share of the cores.",
    ),
    _count(
        "--repeats",
        "num_repeats",
        6,
        "Timed loads of each method; a 95 % interval of the median needs at least 6.",
    ),
    click.option(
        "--file_cache",
        type=click.Choice(["warm", "cold"]),
        default="warm",
        show_default=True,
        help="Read the files once before every load, or drop them from the file cache.",
    ),
    click.option(
        "--picture", "picture_file", type=_file, help="Draw the times into this PNG file."
    ),
)
def load_command(
    benchmark: str,
    size: str | None,
    data_dir: str | None,
    methods: str | None,
    threads: int,
    json_file: Path | None,
    picture_file: Path | None,
    flags: tuple[str, ...],
    **conditions: Any,
) -> None:
    """Compare the loaders of BENCHMARK's files, as the paper's Tables 3 and 4 do.

    Every load is a job of its own. Memory is measured in a job that is not timed. All methods must
    read the same values.

    Flags after "--" go to the benchmark: candle-p1 bench load p1b3 -- --drug_features all.
    """
    from candle_p1.bench import show_load
    from candle_p1.bench.load import LoadComparison, LoadJob, choose_methods

    _check_directories({"--json": json_file, "--picture": picture_file})
    names = choose_methods(methods)
    job = LoadJob(benchmark, _benchmark_flags(size, data_dir, flags), names[0], threads)
    report = _measure(LoadComparison(job, methods=names, **conditions))
    _show(show_load.parts(report), report, json_file)
    if picture_file:
        show_load.picture(report, picture_file)
        Screen().say(f"picture: {picture_file}")


@command.command("step")
@_options(
    _count("--np", "num_ranks", 1, "Number of ranks, all on this machine."),
    click.option(
        "--against",
        type=click.Choice(["plain", "none"]),
        default="plain",
        show_default=True,
        help="Compare with plain Keras (several ranks: with one process, and with ranks that do not"
        " average gradients), or with nothing.",
    ),
    _count("--steps", "num_steps", 5, "Timed steps of a job, after a warm-up."),
    _count(
        "--rounds",
        "num_rounds",
        2,
        "Jobs of each variant. A 95 % interval of the median needs at least 6 steps in total.",
    ),
)
def step_command(
    benchmark: str,
    size: str | None,
    data_dir: str | None,
    against: str,
    num_steps: int,
    json_file: Path | None,
    flags: tuple[str, ...],
    **conditions: Any,
) -> None:
    """Compare BENCHMARK's training step with that of plain Keras and with its roofline bound.

    The bound is the time of the matrix products and of the optimizer's memory traffic at the rates
    that this machine reaches, which are measured in the same job.

    Flags after "--" go to the benchmark: candle-p1 bench step nt3 -- --batch_size 40.
    """
    from candle_p1.bench import show_step
    from candle_p1.bench.step import StepComparison, StepJob

    _check_directories({"--json": json_file})
    job = StepJob(benchmark, _benchmark_flags(size, data_dir, flags), num_steps=num_steps)
    report = _measure(StepComparison(job, against=against == "plain", **conditions))
    _show(show_step.parts(report), report, json_file)


@command.command("overhead")
@_options(
    _count("--np", "num_ranks", 2, "Number of ranks, all on this machine."),
    _count("--epochs", "num_epochs", 10, "Epochs of a block."),
    _count("--rounds", "num_rounds", 30, "Rounds of one block with measuring and one without."),
)
def overhead_command(
    benchmark: str,
    size: str | None,
    data_dir: str | None,
    num_ranks: int,
    num_epochs: int,
    num_rounds: int,
    json_file: Path | None,
    flags: tuple[str, ...],
) -> None:
    """Measure the overhead of a run's own measuring: phases, steps and the log of communication.

    Two models of BENCHMARK train in turn in one job, one with measuring and one without.

    Flags after "--" go to the benchmark: candle-p1 bench overhead nt3 -- --batch_size 40.
    """
    from candle_p1.bench.overhead import OverheadJob, OverheadMeasurement, lines

    _check_directories({"--json": json_file})
    own_flags = _benchmark_flags(size, data_dir, flags)
    job = OverheadJob(benchmark, own_flags, num_epochs, num_rounds)
    report = _measure(OverheadMeasurement(job, num_ranks))
    _show(lines(report), report, json_file)


@command.command("record")
@_count("--ranks", "num_ranks", 3072, "Number of ranks.")
@_count("--epochs", "num_epochs", 8, "Number of epochs.")
@_count("--records", "num_records", 20, "Number of records that the report is made from.")
@_json
def record_command(json_file: Path | None, **conditions: int) -> None:
    """Measure the size of a record of many ranks, and the time to write, read and report it.

    The records are synthetic; nothing is trained.
    """
    from candle_p1.bench.record import RecordMeasurement, lines

    _check_directories({"--json": json_file})
    report = RecordMeasurement(**conditions).measure()
    _show(lines(report), report, json_file)


def _benchmark_flags(size: str | None, data_dir: str | None, flags: tuple[str, ...]) -> list[str]:
    """Returns the benchmark's flags, including those for the data."""
    if size and data_dir:
        raise ParameterError("--size and --data_dir select different files: give only one of them")
    named = [("--size", size), ("--data_dir", data_dir)]
    return [argument for flag, value in named if value for argument in (flag, value)] + list(flags)


def _check_directories(paths: Mapping[str, Path | None]) -> None:
    for option, path in paths.items():
        if path and not os.access(path.absolute().parent, os.W_OK):
            raise ParameterError(f"{option} {path}: the directory does not exist or is read-only")


def _measure(comparison: Measurement) -> dict[str, Any]:
    """Generates missing data, and measures."""
    from candle_p1.cluster.process import Interrupted, signals_interrupt

    screen = Screen()
    with screen.making_data() as progress:
        files = comparison.locate_files(progress)
    for note in comparison.notes:
        screen.say(f"note: {note}")
    try:
        with signals_interrupt(), _progress() as on_start:
            return comparison.measure(files, on_start)
    except Interrupted as interrupted:
        raise click.exceptions.Exit(128 + interrupted.number) from None


def _show(parts: Iterable[str | Table], report: Mapping[str, Any], json_file: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))
    if json_file:
        write_atomically(json_file, json.dumps(report, indent=2, allow_nan=False) + "\n")
        Screen().say(f"results: {json_file}")


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Provides a function (jobs done, all jobs, next job) that shows a bar on a terminal."""
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
