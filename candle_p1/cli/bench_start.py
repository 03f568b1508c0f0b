"""candle-p1 bench start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from candle_p1.cli.base import BenchmarkCommand
from candle_p1.cli.bench_options import count_option, measure, measurement_options, show

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    "start",
    cls=BenchmarkCommand,
    examples=[
        "candle-p1 bench start nt3 --size full",
        "candle-p1 bench start p1b2 --np 2 --rounds 3 --json start.json",
    ],
)
@measurement_options(
    count_option("--np", "num_ranks", 1, "Number of ranks, all on this machine."),
    count_option(
        "--rounds",
        "num_rounds",
        6,
        "Starts of each kind; a 95 % interval of the median needs at least 6.",
    ),
)
def start_command(
    benchmark: str,
    num_ranks: int,
    num_rounds: int,
    json_file: Path | None,
    flags: list[str],
) -> None:
    """Measure the start of BENCHMARK: from the command to the end of the first step.

    Starts `candle-p1 run`, limited to two steps, and shows where the time goes: launching, imports,
    devices, self-test, loading, building, tracing. In turn with it, as many processes as ranks only
    import the framework (TensorFlow, or JAX with --engine jax) and read the bytes of the files.

    All other flags go to the benchmark.
    """
    from candle_p1.bench import show_start
    from candle_p1.bench.start import StartComparison, StartJob

    comparison = StartComparison(StartJob(benchmark, flags), num_ranks, num_rounds)
    report = measure(comparison)
    show(show_start.parts(report), report, json_file)
