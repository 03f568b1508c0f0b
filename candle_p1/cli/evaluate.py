"""candle-p1 evaluate: how good a trained network is on labelled samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from candle_p1.cli.base import Command, number_option
from candle_p1.cli.data import table_options
from candle_p1.cli.predict import (
    benchmark_option,
    checkpoint_option,
    missing_option,
    run_argument,
)
from candle_p1.parameters.catalog import MAX_SEED
from candle_p1.text import count
from candle_p1.training.screen import Screen

PATH = click.Path(path_type=Path)


@click.command(
    "evaluate",
    cls=Command,
    examples=[
        "candle-p1 evaluate output/nt3/EXP000/RUN000 --test_data new.csv --label tissue"
        " --group patient"
    ],
)
@run_argument
@click.option("--test_data", "table", required=True, type=PATH, help="The table of samples.")
@click.option("--group", help="The column, such as patients, whose samples are drawn together.")
@click.option(
    "-o",
    "--out",
    "directory",
    type=PATH,
    help="The directory to write to; default: evaluation-TABLE in RUN_DIR.",
)
@checkpoint_option
@benchmark_option
@number_option(
    "--samples", "num_draws", "The number of bootstrap samples.", 1000, least=100, most=100_000
)
@number_option("--seed", "seed", "The seed of the bootstrap.", 0, least=0, most=MAX_SEED)
@table_options
@missing_option
def command(
    run_dir: Path,
    table: Path,
    directory: Path | None,
    checkpoint: Any,
    benchmark: str | None,
    num_draws: int,
    seed: int,
    **options: Any,
) -> None:
    """Evaluate the network that RUN_DIR trained on labelled samples.

    Shows the metrics with intervals, and writes evaluation.json and pictures. The samples are a
    file in the benchmark's own format, or a table that `candle-p1 data import` would read.
    """
    from candle_p1.datasets.foreign import SampleOptions
    from candle_p1.inference.evaluation import Bootstrap, Evaluator, tables
    from candle_p1.inference.tables import read_samples
    from candle_p1.inference.trained import open_run

    screen = Screen()
    trained = open_run(run_dir, benchmark=benchmark, checkpoint=checkpoint)
    samples = read_samples(trained, table, SampleOptions(**options))
    for note in samples.notes:
        screen.say(note)
    where = directory or run_dir / f"evaluation-{table.stem}"
    evaluator = Evaluator(trained, samples, where, Bootstrap(num_draws, seed, options["group"]))
    for warning in evaluator.warnings:
        screen.warn(warning)
    content = evaluator.evaluate()
    of_samples = content["data"]
    group = content["bootstrap"]["group"]
    units = f" in {of_samples['num_units']:,} groups by {group!r}" if group else ""
    screen.say(
        f"{count(of_samples['num_samples'], 'sample')}{units}, drawn {num_draws:,} times; weights:"
        f" {trained.weights}"
    )
    for each in tables(content):
        screen.say(each)
    screen.say(f"results: {where}")
