"""candle-p1 bench conv."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import click

from candle_p1.cli.base import Command
from candle_p1.cli.bench_options import count_option, json_option, show, with_progress

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    "conv",
    cls=Command,
    examples=[
        "candle-p1 bench conv --json conv.json",
        "candle-p1 bench conv --times conv.json",
    ],
)
@count_option("--calls", "num_calls", 7, "Timed calls of each convolution and form.")
@click.option(
    "--times",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="Measure nothing, and fit the model to the times that --json has written into this file.",
)
@json_option
def conv_command(num_calls: int, times: Path | None, json_file: Path | None) -> None:
    """Time convolutions in each of their forms, and fit the model of their costs.

    The model decides which form a layer takes, and `candle-p1 bench step` predicts with it how much
    faster than plain Keras a step is. It is fitted to other convolutions than those of the
    benchmarks, which are predicted beside their times. What is printed as fitted goes into
    candle_p1/models/fast/convolution_costs.py by hand, because the choice must be the same
    everywhere.

    Measuring takes some minutes, with TensorFlow on the CPU.
    """
    from candle_p1.bench import show_convolutions
    from candle_p1.bench.convolutions import ConvolutionMeasurement

    report = with_progress(ConvolutionMeasurement(num_calls, times).measure)
    show(show_convolutions.parts(report), report, json_file)
