"""Commands that use the network of a run: predict, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from candle_p1.cli import base
from candle_p1.cli.data import table_options
from candle_p1.parameters.catalog import MAX_SEED
from candle_p1.text import count
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from candle_p1.inference.tables import NewSamples
    from candle_p1.inference.trained import TrainedRun


network_options = base.together(
    base.option(
        "--checkpoint",
        "Take the weights from a checkpoint, also of a run that has not finished.",
        ["best", "latest"],
    ),
    base.option(
        "--benchmark",
        "The benchmark that the run trained, by name or path; needed if it is not found by name.",
        shell_complete=base.complete_benchmark,
    ),
    table_options,
    base.option("--missing", "How to treat missing values.", ["error", "zero"], default="error"),
)
"""Which network to use, and how to read the table."""

run_argument = click.argument("run_dir", type=base.DIRECTORY)


def _open(
    run_dir: Path, table: Path, benchmark: str | None, checkpoint: Any, **options: Any
) -> tuple[TrainedRun, NewSamples, Screen]:
    from candle_p1.datasets.foreign import SampleOptions
    from candle_p1.inference.tables import read_samples
    from candle_p1.inference.trained import open_run

    screen = Screen()
    trained = open_run(run_dir, benchmark=benchmark, checkpoint=checkpoint)
    samples = read_samples(trained, table, SampleOptions(**options))
    for note in samples.notes:
        screen.say(note)
    return trained, samples, screen


@click.command(
    "predict",
    cls=base.Command,
    examples=[
        "candle-p1 predict output/nt3/EXP000/RUN000 new.csv -o predictions.csv",
        "candle-p1 predict output/p1b2/EXP000/RUN000 new.tsv.gz --transpose True -o types.csv",
    ],
)
@run_argument
@click.argument("table", type=base.PATH)
@base.file_option("-o --out", "The file to write, with a line for each sample.", required=True)
@base.number_option("--batch_size", "Samples in a batch; default: that of training.")
@network_options
def predict_command(out: Path, batch_size: int | None, **given: Any) -> None:
    """Apply the trained network of the run in RUN_DIR to the samples in TABLE.

    TABLE has raw values: a file like those that the run was trained on, or any table that
    `candle-p1 data import` reads, whose features are found by name. For P1B3, it has cell lines,
    drugs and concentrations.
    """
    from candle_p1.inference.tables import write_predictions

    trained, samples, screen = _open(**given)
    num_samples = write_predictions(trained, samples, out, batch_size)
    screen.say(f"{out}: {count(num_samples, 'sample')} by {trained.weights} on {trained.device}")


@click.command(
    "evaluate",
    cls=base.Command,
    examples=[
        "candle-p1 evaluate output/nt3/EXP000/RUN000 --test_data new.csv --label tissue"
        " --group patient"
    ],
)
@run_argument
@base.option("--test_data", "The table of samples.", base.PATH, name="table", required=True)
@base.option("--group", "The column, such as patients, whose samples are drawn together.")
@base.option(
    "-o --out",
    "The directory to write to; default: evaluation-TABLE in RUN_DIR.",
    base.PATH,
    name="directory",
)
@base.number_option(
    "--samples", "The number of bootstrap samples.", 1000, name="num_draws", least=100, most=100_000
)
@base.number_option("--seed", "The seed of the bootstrap.", 0, least=0, most=MAX_SEED)
@network_options
def evaluate_command(
    run_dir: Path, table: Path, directory: Path | None, num_draws: int, seed: int, **given: Any
) -> None:
    """Evaluate the trained network of the run in RUN_DIR on labelled samples.

    Shows the metrics with intervals, and writes evaluation.json and plots. The samples are a file
    in the benchmark's own format, or a table that `candle-p1 data import` would read.
    """
    from candle_p1.inference.evaluation import Bootstrap, Evaluator, tables

    trained, samples, screen = _open(run_dir, table, **given)
    where = directory or run_dir / f"evaluation-{table.stem}"
    evaluator = Evaluator(trained, samples, where, Bootstrap(num_draws, seed, given["group"]))
    for warning in evaluator.warnings:
        screen.warn(warning)
    content = evaluator.evaluate()
    of_samples, group = content["data"], content["bootstrap"]["group"]
    units = f" in {of_samples['num_units']:,} groups by {group!r}" if group else ""
    screen.say(
        f"{count(of_samples['num_samples'], 'sample')}{units}, drawn {num_draws:,} times; weights:"
        f" {trained.weights}"
    )
    for each in tables(content):
        screen.say(each)
    screen.say(f"results: {where}")
