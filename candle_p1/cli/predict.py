"""candle-p1 predict: applies the network of a run to new samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from candle_p1.cli.base import Command, complete_benchmark, file_option, number_option
from candle_p1.cli.data import table_options
from candle_p1.text import count
from candle_p1.training.screen import Screen

PATH = click.Path(path_type=Path)
run_argument = click.argument("run_dir", type=click.Path(file_okay=False, path_type=Path))
checkpoint_option = click.option(
    "--checkpoint",
    type=click.Choice(["best", "latest"]),
    help="Take the weights from a checkpoint, also of a run that has not finished.",
)
benchmark_option = click.option(
    "--benchmark",
    shell_complete=complete_benchmark,
    help="The benchmark that the run trained, by name or path; needed if it is not found by name.",
)

missing_option = click.option(
    "--missing",
    type=click.Choice(["error", "zero"]),
    default="error",
    help="How to treat missing values.",
)


@click.command(
    "predict",
    cls=Command,
    examples=[
        "candle-p1 predict output/nt3/EXP000/RUN000 new.csv -o predictions.csv",
        "candle-p1 predict output/p1b2/EXP000/RUN000 new.tsv.gz --transpose True -o types.csv",
    ],
)
@run_argument
@click.argument("table", type=PATH)
@file_option("-o", "out", "The file to write, with a line for each sample.", "--out", required=True)
@checkpoint_option
@benchmark_option
@number_option("--batch_size", "batch_size", "Samples in a batch; default: that of training.")
@table_options
@missing_option
def command(
    run_dir: Path,
    table: Path,
    out: Path,
    checkpoint: Any,
    benchmark: str | None,
    batch_size: int | None,
    **options: Any,
) -> None:
    """Apply the trained network of the run in RUN_DIR to the samples in TABLE.

    TABLE has raw values: a file like those that the run was trained on, or any table that
    candle-p1 data import reads, whose features are found by name. For P1B3, it has cell lines,
    drugs and concentrations.
    """
    from candle_p1.datasets.foreign import SampleOptions
    from candle_p1.inference.tables import read_samples, write_predictions
    from candle_p1.inference.trained import open_run

    screen = Screen()
    trained = open_run(run_dir, benchmark=benchmark, checkpoint=checkpoint)
    samples = read_samples(trained, table, SampleOptions(**options))
    for note in samples.notes:
        screen.say(note)
    num_samples = write_predictions(trained, samples, out, batch_size)
    screen.say(f"{out}: {count(num_samples, 'sample')} by {trained.weights} on {trained.device}")
