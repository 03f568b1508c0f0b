"""candle-p1 bench: measured comparisons, shown beside what the paper published."""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from candle_p1.cli.base import (
    BenchmarkCommand,
    Command,
    Group,
    benchmark_argument,
    complete_loaders,
    flags_argument,
    write_output,
)
from candle_p1.cluster.process import Interrupted, signals_interrupt
from candle_p1.errors import ParameterError
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rich.table import Table

    from candle_p1.bench.job import Measurement


def _output_file(flag: str, name: str, text: str) -> Callable[..., Any]:
    """Returns an option that takes a file to write, in a directory where this is possible."""

    def check(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
        if path and not os.access(path.absolute().parent, os.W_OK):
            raise ParameterError(f"{flag} {path}: the directory does not exist or is read-only")
        return path

    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(flag, name, type=kind, callback=check, help=text)


_json = _output_file("--json", "json_file", "Write all results to this file.")


def _count(flag: str, name: str, default: int, text: str) -> Callable[..., Any]:
    """Returns an option that takes a positive integer, as large as one can wait for."""
    positive = click.IntRange(1, 100_000)
    return click.option(flag, name, type=positive, default=default, show_default=True, help=text)


def _not_nan(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Checks what a range lets through: nan is neither below nor above a number."""
    if math.isnan(value):
        raise ParameterError(f"{parameter.opts[0]} must be a number, not nan")
    return value


def _options(*own: Callable[..., Any]) -> Callable[..., Any]:
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
        _json,
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


@click.group("bench", cls=Group)
def command() -> None:
    """Measure and compare: data loaders, steps, checkpoints, and the overhead of measuring."""


@command.command(
    "load",
    cls=BenchmarkCommand,
    examples=[
        "candle-p1 bench load nt3 --methods parallel,chunked",
        "candle-p1 bench load p1b3 --np 2 --drug_features all",
    ],
)
@_options(
    click.option(
        "--methods",
        metavar="NAME,NAME,...",
        shell_complete=complete_loaders,
        help="The loaders to compare; by default all that are installed.",
    ),
    _count("--np", "num_ranks", 1, "Number of ranks, which load at the same time as in a run."),
    click.option(
        "--threads",
        type=click.IntRange(0, 1024),
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
    _output_file("--picture", "picture_file", "Draw the times into this PNG file."),
)
def load_command(
    benchmark: str,
    methods: str | None,
    threads: int,
    json_file: Path | None,
    picture_file: Path | None,
    flags: list[str],
    **conditions: Any,
) -> None:
    """Compare the loaders of BENCHMARK's files, as the paper's Tables 3 and 4 do.

    Every load is a job of its own. Memory is measured in a job that is not timed. All methods must
    read the same values.

    All other flags go to the benchmark.
    """
    from candle_p1.bench import show_load
    from candle_p1.bench.load import LoadComparison, LoadJob, choose_methods

    names = choose_methods(methods)
    job = LoadJob(benchmark, flags, names[0], threads)
    report = _measure(LoadComparison(job, methods=names, **conditions))
    _show(show_load.parts(report), report, json_file)
    if picture_file:
        show_load.picture(report, picture_file)
        Screen().say(f"picture: {picture_file}")


@command.command(
    "read",
    cls=BenchmarkCommand,
    examples=[
        "candle-p1 bench read nt3 --np 1,4 --delay 0.2",
        "candle-p1 bench read nt3 --np 1,2,4 --delay 0 --cold --size full",
    ],
)
@_options(
    click.option(
        "--np",
        "ranks",
        metavar="NUM,NUM,...",
        default="1,4",
        show_default=True,
        help="The numbers of ranks to compare; the times are divided by that of the first.",
    ),
    click.option(
        "--delay",
        "delay_s",
        type=click.FloatRange(0, 60),
        default=0.2,
        show_default=True,
        help="The time, in s, that the reading of every block takes more.",
    ),
    _count("--blocks", "num_blocks", 16, "The blocks into which the largest file is divided."),
    _count("--threads", "threads", 1, "Threads of each rank, which read a block together."),
    _count(
        "--repeats",
        "num_repeats",
        3,
        "Loads with each number of ranks; a 95 % interval of the median needs at least 6.",
    ),
    click.option("--cold", is_flag=True, help="Drop the files from the file cache before a load."),
)
def read_command(
    benchmark: str,
    ranks: str,
    delay_s: float,
    num_blocks: int,
    threads: int,
    num_repeats: int,
    cold: bool,
    json_file: Path | None,
    flags: list[str],
) -> None:
    """Measure how the reading of BENCHMARK's files scales with ranks.

    Every load is a job of its own; --delay imitates storage that answers slowly. All jobs divide
    the files into the same blocks, and must read the same values.

    All other flags go to the benchmark.
    """
    from candle_p1.bench import show_read
    from candle_p1.bench.read import ReadComparison, ReadJob, choose_ranks

    numbers = choose_ranks(ranks)
    job = ReadJob(benchmark, flags, delay_s, num_blocks, threads)
    file_cache = "cold" if cold else "warm"
    report = _measure(ReadComparison(job, max(numbers), numbers, num_repeats, file_cache))
    _show(show_read.parts(report), report, json_file)


@command.command(
    "step", cls=BenchmarkCommand, examples=["candle-p1 bench step nt3 --np 2 --batch_size 40"]
)
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
    against: str,
    num_steps: int,
    json_file: Path | None,
    flags: list[str],
    **conditions: Any,
) -> None:
    """Compare BENCHMARK's training step with that of plain Keras and with its roofline bound.

    The bound is the time of the matrix products and of the optimizer's memory traffic at the rates
    that this machine reaches, which are measured in the same job.

    All other flags go to the benchmark.
    """
    from candle_p1.bench import show_step
    from candle_p1.bench.step import StepComparison, StepJob

    job = StepJob(benchmark, flags, num_steps=num_steps)
    report = _measure(StepComparison(job, against=against == "plain", **conditions))
    _show(show_step.parts(report), report, json_file)


@command.command(
    "checkpoint",
    cls=BenchmarkCommand,
    examples=[
        "candle-p1 bench checkpoint p1b1 --size full --mtbf 24",
        "candle-p1 bench checkpoint nt3 --np 2 --directory . --json checkpoint.json",
    ],
)
@_options(
    _count("--np", "num_ranks", 1, "Number of ranks, all on this machine."),
    _count(
        "--rounds",
        "num_rounds",
        3,
        "Jobs of each variant, of two timed saves each. A 95 % interval of the median needs at"
        " least 6 saves.",
    ),
    click.option(
        "--mtbf",
        "mtbf_hours",
        metavar="HOURS",
        type=click.FloatRange(0, 1e6, min_open=True),
        callback=_not_nan,
        default=24.0,
        show_default=True,
        help="The mean time between failures of a job of yours, with all its nodes, for which to"
        " advise intervals.",
    ),
    click.option(
        "--directory",
        type=click.Path(exists=True, file_okay=False, writable=True),
        default=".",
        show_default=True,
        help="Save in this directory, in temporary ones: its disk is measured.",
    ),
)
def checkpoint_command(
    benchmark: str,
    num_ranks: int,
    num_rounds: int,
    mtbf_hours: float,
    directory: str,
    json_file: Path | None,
    flags: list[str],
) -> None:
    """Measure what a checkpoint of BENCHMARK's training costs, beside Keras's ways to save it.

    Compared are the checkpoints of a run, the same where training waits for the disk, and Keras's
    BackupAndRestore and model.save: how long training waits, when the data are safe on the disk,
    at which rate compared with a plain synced write of as many bytes, the memory, and the steps
    meanwhile. From this follow the intervals that Young and Daly advise.

    All other flags go to the benchmark.
    """
    from candle_p1.bench import show_checkpoint
    from candle_p1.bench.checkpoint import HOUR_S, CheckpointComparison, CheckpointJob

    job = CheckpointJob(benchmark, flags, directory=directory)
    comparison = CheckpointComparison(
        job, num_ranks=num_ranks, num_rounds=num_rounds, mtbf_s=mtbf_hours * HOUR_S
    )
    report = _measure(comparison)
    _show(show_checkpoint.parts(report), report, json_file)


@command.command(
    "overhead",
    cls=BenchmarkCommand,
    examples=["candle-p1 bench overhead nt3 --rounds 10 --batch_size 40"],
)
@_options(
    _count("--np", "num_ranks", 2, "Number of ranks, all on this machine."),
    _count("--epochs", "num_epochs", 10, "Epochs of a block."),
    _count("--rounds", "num_rounds", 30, "Rounds of one block with measuring and one without."),
)
def overhead_command(
    benchmark: str,
    num_ranks: int,
    num_epochs: int,
    num_rounds: int,
    json_file: Path | None,
    flags: list[str],
) -> None:
    """Measure the overhead of a run's own measuring: phases, steps and the log of communication.

    Two models of BENCHMARK train in turn in one job, one with measuring and one without.

    All other flags go to the benchmark.
    """
    from candle_p1.bench.overhead import OverheadJob, OverheadMeasurement, lines

    job = OverheadJob(benchmark, flags, num_epochs, num_rounds)
    report = _measure(OverheadMeasurement(job, num_ranks))
    _show(lines(report), report, json_file)


@command.command(
    "record", cls=Command, examples=["candle-p1 bench record --ranks 384 --json record.json"]
)
@_count("--ranks", "num_ranks", 3072, "Number of ranks.")
@_count("--epochs", "num_epochs", 8, "Number of epochs.")
@_count("--records", "num_records", 20, "Number of records that the report is made from.")
@_json
def record_command(json_file: Path | None, **conditions: int) -> None:
    """Measure the size of a record of many ranks, and the time to write, read and report it.

    The records are synthetic; nothing is trained.
    """
    from candle_p1.bench.record import RecordMeasurement, lines

    report = RecordMeasurement(**conditions).measure()
    _show(lines(report), report, json_file)


def _measure(comparison: Measurement) -> dict[str, Any]:
    """Generates missing data, and measures."""
    screen = Screen()
    with screen.making_data() as progress:
        files = comparison.locate_files(progress)
    for note in comparison.notes:
        screen.say(f"note: {note}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with signals_interrupt(), screen.bar(*columns, TimeElapsedColumn()) as bar:
            task = bar.add_task("", total=None)

            def on_start(done: int, total: int, what: str) -> None:
                bar.update(task, completed=done, total=total, description=what)

            return comparison.measure(files, on_start)
    except Interrupted as interrupted:
        raise click.exceptions.Exit(128 + interrupted.number) from None


def _show(parts: Iterable[str | Table], report: Mapping[str, Any], json_file: Path | None) -> None:
    screen = Screen()
    for part in parts:
        screen.say(part)
    if json_file:
        write_output("--json", json_file, json.dumps(report, indent=2, allow_nan=False) + "\n")
        screen.say(f"results: {json_file}")
