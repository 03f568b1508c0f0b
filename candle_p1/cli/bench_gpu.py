"""candle-p1 bench gpu."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from candle_p1.cli.base import Command, FiniteRange, complete_benchmark
from candle_p1.cli.bench_options import count_option, json_option, show, with_progress
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    "gpu",
    cls=Command,
    examples=[
        "candle-p1 bench gpu --json gpu.json",
        "candle-p1 bench gpu nt3 --device cpu --size small",
    ],
)
@click.argument("benchmarks", metavar="[BENCHMARK]...", nargs=-1, shell_complete=complete_benchmark)
@click.option(
    "--device",
    type=click.Choice(["gpu", "cpu"]),
    default="gpu",
    show_default=True,
    help="What to measure; with cpu, the results say nothing of any GPU.",
)
@click.option(
    "--size",
    type=click.Choice(["small", "full"]),
    default="full",
    show_default=True,
    help="The size of the synthetic files.",
)
@click.option(
    "--np",
    "num_ranks",
    type=click.IntRange(1, 100_000),
    help="Ranks that train together, beside one (default: one for each GPU).",
)
@count_option("--steps", "num_steps", 200, "Steps of a timed block, at most those of an epoch.")
@click.option(
    "--seconds",
    type=FiniteRange(0, 3600),
    default=10.0,
    show_default=True,
    help="How long each job repeats such blocks; sensors of energy need seconds.",
)
@count_option("--rounds", "num_rounds", 2, "Jobs of each variant; the first one starts cold.")
@json_option
def gpu_command(benchmarks: tuple[str, ...], json_file: Path | None, **conditions: Any) -> None:
    """Measure training with JAX on this machine's GPUs, by precision; by default all benchmarks.

    Shows the time of a step and of an epoch in float32, TF32 and bfloat16, each beside plain Keras
    on JAX and beside the bound that follows from the device's own rates, which are measured, too;
    the time from the start to the first step, with and without programs compiled before; and the
    energy of an epoch, by the GPUs' counters and by their integrated power.

    Exits with 2 where there is no GPU.
    """
    from candle_p1.bench import show_gpu
    from candle_p1.bench.gpu import BENCHMARKS, GpuMeasurement

    measurement = GpuMeasurement(benchmarks or BENCHMARKS, **conditions)
    device = with_progress(measurement.measure_device)
    with Screen().making_data() as progress:
        measurement.make_data(progress)
    report = with_progress(lambda on_start: measurement.measure(device, on_start))
    show(show_gpu.parts(report), report, json_file)
