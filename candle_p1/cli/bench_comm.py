"""candle-p1 bench comm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from candle_p1.cli.base import Command, FiniteRange, write_output
from candle_p1.cli.bench_options import (
    json_option,
    output_file_option,
    show,
    with_progress,
)
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    "comm",
    cls=Command,
    examples=[
        "candle-p1 bench comm --np 2 --json comm.json --picture comm.svg",
        "candle-p1 bench comm --through mpi --operations allreduce --max_bytes 4194304",
    ],
)
@click.option(
    "--np",
    "num_ranks",
    type=click.IntRange(1, 100_000),
    help="Ranks that are started on this machine (default: 2). Not where a launcher starts this"
    " command on every rank, as for several nodes.",
)
@click.option(
    "--through",
    metavar="NAME,NAME,...",
    help="What to measure: mpi, shared_memory, horovod, horovod_fusion, horovod_paper, jax; by"
    " default all that are installed and can connect the ranks.",
)
@click.option(
    "--operations",
    metavar="NAME,NAME,...",
    help="The operations: allreduce, allreduce_of_16, broadcast, allgather, reduce_scatter,"
    " point_to_point, point_to_point_on_node, stream; by default all.",
)
@click.option(
    "--min_bytes",
    type=click.IntRange(4, 1 << 40),
    default=4,
    show_default=True,
    help="The smallest size; each is four times the one before, and from 4 MiB on twice.",
)
@click.option(
    "--max_bytes",
    type=click.IntRange(4, 1 << 40),
    default=1 << 30,
    show_default=True,
    help="The largest size, and that of the largest gradients; memory may limit them further.",
)
@click.option(
    "--seconds",
    type=FiniteRange(0, 3600, min_open=True),
    default=0.5,
    show_default=True,
    help="How long a size is measured, unless its 95 % interval is within 5 % before.",
)
@click.option("--without_computing", is_flag=True, help="Measure no allreduces beside computing.")
@click.option(
    "--other_python",
    metavar="PYTHON",
    help="Measure what is not installed here in the environment of this interpreter, such as one"
    " with JAX beside one with Horovod.",
)
@json_option
@output_file_option(
    "--picture", "picture_file", "Draw times and bandwidths into this .png or .svg file."
)
@output_file_option("--html", "html_file", "Write a page with the picture and all tables.")
def comm_command(
    num_ranks: int | None,
    through: str | None,
    operations: str | None,
    min_bytes: int,
    max_bytes: int,
    seconds: float,
    without_computing: bool,
    other_python: str | None,
    json_file: Path | None,
    picture_file: Path | None,
    html_file: Path | None,
) -> None:
    """Measure latency and bandwidth between ranks by message size, through MPI and each engine.

    Shows the times of allreduce, broadcast, allgather, reduce-scatter and point to point, with
    algorithm and bus bandwidth as nccl-tests define them; the allreduce of the gradients of the
    four benchmarks; how much of an allreduce is hidden behind computing; and the latency and
    bandwidth that are fitted to the times.

    Starts ranks on this machine, or is started on every rank by a launcher, such as srun.
    """
    from candle_p1.bench.comm import (
        GRADIENT_BYTES,
        CommJob,
        CommMeasurement,
        choose_operations,
        choose_sizes,
    )
    from candle_p1.bench.elsewhere import Elsewhere
    from candle_p1.bench.show_comm import parts
    from candle_p1.distributed.launch_environment import launcher_variable
    from candle_p1.distributed.transports import choose_transports

    is_launched = num_ranks is None and launcher_variable() is not None
    job = CommJob(
        choose_transports(through, one_process=is_launched),
        choose_operations(operations),
        choose_sizes(min_bytes, max_bytes),
        sorted(size for size in GRADIENT_BYTES.values() if min_bytes <= size <= max_bytes),
        seconds,
        not without_computing,
    )
    other = Elsewhere.of(other_python) if other_python and not is_launched else None
    measurement = CommMeasurement(job, None if is_launched else num_ranks or 2, other)
    if is_launched:
        from candle_p1.bench.comm_worker import measure_here

        report = measure_here(measurement)
    else:
        for note in measurement.notes:
            Screen().say(f"note: {note}")
        report = with_progress(measurement.measure)
    if report is None:  # another rank shows it
        return
    show(parts(report), report, json_file)
    if picture_file or html_file:
        from candle_p1.bench.draw_comm import page, picture

        if picture_file:
            drawn = picture(report)
            is_png = picture_file.suffix == ".png"
            write_output("--picture", picture_file, drawn.png if is_png else drawn.svg)
            Screen().say(f"picture: {picture_file}")
        if html_file:
            write_output("--html", html_file, page(report))
            Screen().say(f"page: {html_file}")
