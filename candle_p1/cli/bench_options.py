"""What the commands of candle-p1 bench share: options, and measuring with a bar of progress."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from candle_p1.cli.base import benchmark_argument, flags_argument, write_output
from candle_p1.cluster.process import Interrupted, signals_interrupt
from candle_p1.errors import ParameterError
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rich.table import Table

    from candle_p1.bench.job import Measurement, OnStart

Found = TypeVar("Found")


def output_file_option(flag: str, name: str, text: str) -> Callable[..., Any]:
    """Returns an option that takes a file to write, in a directory where this is possible."""

    def check(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
        if path and not os.access(path.absolute().parent, os.W_OK):
            raise ParameterError(f"{flag} {path}: the directory does not exist or is read-only")
        return path

    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(flag, name, type=kind, callback=check, help=text)


json_option = output_file_option("--json", "json_file", "Write all results to this file.")


def count_option(flag: str, name: str, default: int, text: str) -> Callable[..., Any]:
    """Returns an option that takes a positive integer, as large as one can wait for."""
    positive = click.IntRange(1, 100_000)
    return click.option(flag, name, type=positive, default=default, show_default=True, help=text)


def measurement_options(*own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a decorator that adds the arguments and options of all measurements, and own ones.

    The function gets the benchmark's flags, among them those for the data.
    """
    sizes = click.Choice(["small", "full"])
    shared = (
        benchmark_argument,
        click.option(
            "--size", type=sizes, help="Use synthetic files of this size (default: small)."
        ),
        click.option("--data_dir", metavar="DIR", help="Use CANDLE's files in this directory."),
        *own,
        json_option,
        flags_argument,
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(
            size: str | None, data_dir: str | None, flags: tuple[str, ...], **options: Any
        ) -> None:
            if size and data_dir:
                raise ParameterError(
                    "--size and --data_dir select different files: give only one of them"
                )
            named = {"--size": size, "--data_dir": data_dir}
            data = [word for flag, value in named.items() if value for word in (flag, value)]
            function(flags=[*data, *flags], **options)

        for option in reversed(shared):
            command = option(command)
        return command

    return decorate


def measure(comparison: Measurement) -> dict[str, Any]:
    """Generates missing data, and measures; returns the report."""
    screen = Screen()
    with screen.making_data() as progress:
        files = comparison.locate_files(progress)
    for note in comparison.notes:
        screen.say(f"note: {note}")
    return with_progress(lambda on_start: comparison.measure(files, on_start))


def with_progress(measure: Callable[[OnStart], Found]) -> Found:
    """Returns what a function measures, with a bar of the jobs that it starts."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with signals_interrupt(), Screen().bar(*columns, TimeElapsedColumn()) as bar:
            task = bar.add_task("", total=None)

            def on_start(done: int, total: int, what: str) -> None:
                bar.update(task, completed=done, total=total, description=what)

            return measure(on_start)
    except Interrupted as interrupted:
        raise click.exceptions.Exit(128 + interrupted.number) from None


def show(parts: Iterable[str | Table], report: Mapping[str, Any], json_file: Path | None) -> None:
    """Prints the lines and tables of a report, and writes it to a file if one is given."""
    screen = Screen()
    for part in parts:
        screen.say(part)
    if json_file:
        write_output("--json", json_file, json.dumps(report, indent=2, allow_nan=False) + "\n")
        screen.say(f"results: {json_file}")
