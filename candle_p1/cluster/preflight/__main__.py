"""``python -m candle_p1.cluster.preflight``: the command line of the preflight.

The launcher starts it as it will start the job, with all ranks or with one per node.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import platform
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from candle_p1.cluster.doctor import Finding, show
from candle_p1.cluster.preflight.checks import Needs
from candle_p1.cluster.preflight.examination import examine
from candle_p1.distributed.comm import check_ranks, connect
from candle_p1.distributed.gpus import requested_gpus
from candle_p1.distributed.launch_environment import NODE_VARIABLE, launched_rank, node_name
from candle_p1.errors import EXIT_CODE, CandleError
from candle_p1.text import print_error
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn, TypeVar

    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.launch_environment import LaunchedRank

    Command = TypeVar("Command", bound=Callable[..., object])


def _finite(_: click.Context, option: click.Parameter, value: float) -> float:
    if not math.isfinite(value):  # click lets nan through
        raise click.BadParameter(f"{value} is not a finite number.", param=option)
    return value


def _amount(flag: str, description: str) -> Callable[[Command], Command]:
    default = getattr(Needs, flag.removeprefix("--").replace("-", "_"))
    option = partial(click.option, flag, type=click.FloatRange(0), callback=_finite)
    return option(default=default, show_default=True, help=description)


@click.command("preflight", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Needs.output,
    show_default=True,
    help="Directory for results.",
)
@click.option(
    "--file",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A data file that every node has to see; may be repeated.",
)
@click.option(
    "--gpus",
    "num_gpus",
    type=click.IntRange(0),
    help="GPUs that a node needs; default: what the job asked for, or what most nodes have.",
)
@_amount("--shm-gib", "GiB that have to be free in /dev/shm.")
@_amount("--memory-gib", "GiB of memory that have to be free.")
@_amount(
    "--disk-gib",
    "GiB that have to be free for results, and for data and caches in CANDLE_DATA_DIR.",
)
@_amount("--clock-s", "Seconds by which a node's clock may be off.")
def command(**needs: Any) -> Needs:
    """Examine every node of a job; exit with code 2 if one lacks what the job needs.

    Start it with the job's launcher before the job: srun python -m candle_p1.cluster.preflight
    """
    request = requested_gpus()
    if needs["num_gpus"] is None and request is not None:
        needs |= {"num_gpus": request.num, "gpus_origin": request.origin}
    return Needs(**needs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the preflight from the command line, on every rank.

    Exits with code 2 after an error that the user can fix. A launcher may end the job at the first
    rank that exits with an error, so rank 0 prints the error before any other rank exits.
    """
    try:
        layout = launched_rank()
        needs = _parse(arguments, layout.rank)
        comm = connect()
    except CandleError as error:  # perhaps on this node alone, and the others wait for this rank
        node = os.environ.get(NODE_VARIABLE) or platform.node()
        print_error(f"node {node}: {error}")
        sys.exit(EXIT_CODE)
    try:
        check_ranks(layout, comm)
        findings = examine(comm, needs, node_name())
    except CandleError as error:
        _end(error, layout, comm)
    except Exception:
        traceback.print_exc()
        comm.abort(1)
    screen = Screen(comm.rank)
    for finding in (Finding("launcher", layout.launcher), *findings):
        show(finding, screen)
    screen.say("the nodes have what the job needs")


def _end(error: CandleError, layout: LaunchedRank, comm: Communicator) -> NoReturn:
    if error.agreed:
        if comm.rank == 0:
            print_error(error)
        comm.barrier()
        sys.exit(EXIT_CODE)
    # To MPI every rank is the only one, so all have the same error. aprun does not tell the number
    # of ranks, so its rank 0 has none.
    if layout.rank != (0 if layout.size is not None else 1):
        sys.exit(0)
    print_error(error)
    sys.exit(EXIT_CODE)


def _parse(arguments: Sequence[str] | None, rank: int) -> Needs:
    """Returns the job's needs. Rank 0 prints --help and errors, after which all ranks exit."""
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
