"""candle-p1 bench: measured comparisons, shown beside what the paper published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from candle_p1.cli.base import BenchmarkCommand
from candle_p1.cli.bench_comm import comm_command
from candle_p1.cli.bench_gpu import gpu_command
from candle_p1.cli.bench_options import (
    count_option,
    measure,
    measurement_options,
    show,
)
from candle_p1.cli.bench_verbs import Verbs

if TYPE_CHECKING:
    from pathlib import Path


@click.group("bench", cls=Verbs)
def command() -> None:
    """Measure and compare: loaders, steps, starts, messages, GPUs, checkpoints."""


command.add_command(comm_command)
command.add_command(gpu_command)


@command.command(
    "step",
    cls=BenchmarkCommand,
    examples=[
        "candle-p1 bench step nt3 --np 2 --batch_size 40",
        "candle-p1 bench step nt3 --np 2 --other_python .venv-jax/bin/python",
        "candle-p1 bench step nt3 --keras2 .venv-keras2 --by_weight",
    ],
)
@measurement_options(
    count_option("--np", "num_ranks", 1, "Number of ranks, all on this machine."),
    click.option(
        "--against",
        type=click.Choice(["plain", "none"]),
        default="plain",
        show_default=True,
        help="Compare with plain Keras (several ranks: with one process, and with ranks that do not"
        " average gradients), or with nothing.",
    ),
    count_option("--steps", "num_steps", 5, "Timed steps of a job, after a warm-up."),
    count_option(
        "--rounds",
        "num_rounds",
        2,
        "Jobs of each variant. A 95 % interval of the median needs at least 6 steps in total.",
    ),
    click.option(
        "--other_python",
        metavar="PYTHON",
        help="Measure the same in turn in the environment of this interpreter, such as one with JAX"
        " beside one with TensorFlow.",
    ),
    click.option(
        "--keras2",
        metavar="DIRECTORY",
        help="Compare with CANDLE's own generation of Keras, too: with tf_keras in this directory,"
        " where `make keras2` has put it.",
    ),
    click.option(
        "--by_weight", is_flag=True, help="List the differences of each weight between variants."
    ),
)
def step_command(
    benchmark: str,
    against: str,
    num_steps: int,
    other_python: str | None,
    keras2: str | None,
    by_weight: bool,
    json_file: Path | None,
    flags: list[str],
    **conditions: Any,
) -> None:
    """Compare BENCHMARK's training step with that of plain Keras and with its roofline bound.

    The bound is the time of the matrix products and of the optimizer's memory traffic at the rates
    that this machine reaches, which are measured in the same job. The step has the engine of this
    environment (--engine), and with --other_python that of another one, too.

    All other flags go to the benchmark.
    """
    from candle_p1.bench import show_step
    from candle_p1.bench.elsewhere import Elsewhere
    from candle_p1.bench.step import StepComparison, StepJob
    from candle_p1.models.keras2 import check_directory

    job = StepJob(benchmark, flags, num_steps=num_steps)
    conditions["other"] = Elsewhere.of(other_python) if other_python else None
    conditions["keras2"] = check_directory(keras2) if keras2 else None
    report = measure(StepComparison(job, against=against == "plain", **conditions))
    show(show_step.parts(report, by_weight=by_weight), report, json_file)
