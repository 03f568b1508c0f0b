"""candle-p1 data: synthetic data sets."""

from __future__ import annotations

from pathlib import Path

import click

from candle_p1.benchmark import find_benchmark
from candle_p1.data.synthetic import make
from candle_p1.errors import ParameterError
from candle_p1.instrument.screen import Screen


@click.group("data")
def command() -> None:
    """Make data sets."""


@command.command("make")
@click.argument("benchmark")
@click.option(
    "--size",
    default="full",
    show_default=True,
    type=click.Choice(["full", "small"]),
    help="The published shape, or one with fewer features.",
)
@click.option(
    "--out",
    "directory",
    required=True,
    type=click.Path(path_type=Path),
    help="The directory to write to.",
)
@click.option(
    "--seed",
    default=2019,
    show_default=True,
    type=click.IntRange(min=0),
    help="The same seed gives the same bytes.",
)
def make_command(benchmark: str, size: str, directory: Path, seed: int) -> None:
    """Write synthetic files of BENCHMARK's published layout, for runs without the real ones."""
    recipe = find_benchmark(benchmark).recipe
    if recipe is None:
        raise ParameterError(f"{benchmark} has no synthetic data")
    screen = Screen()
    with screen.making_data() as progress:
        manifest = make(recipe, size, directory, seed, progress)
    for name, facts in manifest.files.items():
        mib = facts["bytes"] / 2**20
        screen.say(f"{manifest.directory / name}: {mib:.1f} MiB, synthetic, seed {seed}")
