"""``python -m candle_p1.cluster.preflight``: the preflight's command line.

Started by the launcher as the job will be, with all its ranks or one per node.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import click

from candle_p1.cluster.preflight.checks import GIB, Needs
from candle_p1.cluster.preflight.examination import check_ranks, examine, show
from candle_p1.distributed.comm import NODE_VARIABLE, connect
from candle_p1.distributed.launch_environment import launched_rank
from candle_p1.errors import EXIT_CODE, CandleError
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.launch_environment import LaunchedRank

DEFAULT = Needs()


@click.command("preflight", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=DEFAULT.output,
    show_default=True,
    help="Directory for results.",
)
@click.option(
    "--file",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A data file that every node must see; repeatable.",
)
@click.option("--gpus", type=click.IntRange(0), help="GPUs of a node; default: what most have.")
@click.option(
    "--shm-gib",
    type=click.FloatRange(0),
    default=DEFAULT.shared_memory_bytes / GIB,
    show_default=True,
    help="GiB to be free in /dev/shm.",
)
@click.option(
    "--memory-gib",
    type=click.FloatRange(0),
    default=DEFAULT.memory_bytes / GIB,
    show_default=True,
    help="GiB of memory to be free.",
)
@click.option(
    "--disk-gib",
    type=click.FloatRange(0),
    default=DEFAULT.disk_bytes / GIB,
    show_default=True,
    help="GiB to be free for results, and for data and caches in CANDLE_DATA_DIR.",
)
@click.option(
    "--clock-s",
    type=click.FloatRange(0),
    default=DEFAULT.clock_s,
    show_default=True,
    help="Seconds that the nodes' clocks may be apart.",
)
def command(
    output: Path,
    files: tuple[Path, ...],
    gpus: int | None,
    shm_gib: float,
    memory_gib: float,
    disk_gib: float,
    clock_s: float,
) -> Needs:
    """Examine every node of a job; ends with code 2 if one lacks what the job needs.

    Start it by the job's launcher, ahead of the job: srun python -m candle_p1.cluster.preflight
    """
    return Needs(
        output=output,
        files=files,
        num_gpus=gpus,
        shared_memory_bytes=shm_gib * GIB,
        memory_bytes=memory_gib * GIB,
        disk_bytes=disk_gib * GIB,
        clock_s=clock_s,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the preflight from the command line, on every rank.

    Exits with 2 after what the user can mend. A launcher may end the job at the first rank that
    exits with an error: rank 0 speaks before any other does.
    """
    try:
        layout = launched_rank()
        needs = _parse(arguments, layout.rank)
        comm = connect()
    except CandleError as error:  # perhaps on this node alone: the others wait for this rank
        node = os.environ.get(NODE_VARIABLE) or platform.node()
        print(f"error: node {node}: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
    try:
        check_ranks(layout, comm)
        findings = examine(comm, needs, os.environ.get(NODE_VARIABLE) or layout.node)
        show(findings, layout, Screen(comm.rank))
    except CandleError as error:
        _end(error, layout, comm)
    except Exception:
        traceback.print_exc()
        comm.abort(1)


def _end(error: CandleError, layout: LaunchedRank, comm: Communicator) -> NoReturn:
    if error.agreed:
        if comm.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        comm.barrier()
        sys.exit(EXIT_CODE)
    # MPI takes each rank for the only one, and all have the same to say. aprun does not tell the
    # number of ranks, so that its rank 0 finds nothing wrong.
    if layout.rank != (0 if layout.size is not None else 1):
        sys.exit(0)
    print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(EXIT_CODE)


def _parse(arguments: Sequence[str] | None, rank: int) -> Needs:
    """Returns what the arguments ask for; one rank speaks, also for --help, which ends here."""
    silence = io.StringIO()
    try:
        with contextlib.redirect_stdout(silence) if rank else contextlib.nullcontext():
            parsed = command.main(
                arguments, prog_name="python -m candle_p1.cluster.preflight", standalone_mode=False
            )
    except click.ClickException as error:
        if rank != 0:
            sys.exit(0)
        error.show()
        sys.exit(error.exit_code)
    if not isinstance(parsed, Needs):  # --help
        sys.exit(0)
    return parsed


if __name__ == "__main__":
    main()
