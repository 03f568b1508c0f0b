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
from candle_p1.instrument.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.table import Table


@click.group("bench")
def command() -> None:
    """Measure and compare: ways to load the data."""


@command.command("load")
@click.argument("benchmark")
@click.option(
    "--size",
    type=click.Choice(["small", "full"]),
    help="Load synthetic files of this size; small by default.",
)
@click.option("--data_dir", metavar="DIRECTORY", help="Load the files there, under CANDLE's names.")
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
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results and all raw values to this file.",
)
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

    if size and data_dir:
        raise ParameterError("--size is of synthetic files and --data_dir names others: give one")
    for option, path in (("--json", json_file), ("--picture", picture_file)):
        if path and not os.access(path.absolute().parent, os.W_OK):
            raise ParameterError(f"{option} {path}: there is no directory to write it to")
    named = [("--size", size), ("--data_dir", data_dir)]
    words = [word for flag, value in named if value for word in (flag, value)]
    comparison = Comparison(benchmark, [*words, *flags], choose_methods(methods), **conditions)

    screen = Screen()
    with screen.making_data() as making:
        files = comparison.locate_files(making)
    for note in comparison.notes:
        screen.say(f"note: {note}")
    with _ended_by_signals(), _progress() as starting:
        report = comparison.measure(files, starting)
    _print(show.parts(report))
    if json_file:
        write_atomically(json_file, json.dumps(report, indent=2, allow_nan=False) + "\n")
        screen.say(f"results: {json_file}")
    if picture_file:
        show.picture(report, picture_file)
        screen.say(f"picture: {picture_file}")


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
