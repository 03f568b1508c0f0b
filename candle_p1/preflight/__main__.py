"""``python -m candle_p1.preflight``: what a job needs, on all its nodes, before it starts.

Started by the launcher as the job will be, with all its ranks or one per node. Every rank says what
it finds (candle_p1.node_facts); rank 0 judges (candle_p1.node_checks), and shows one table, or one
error that names the nodes.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from candle_p1 import node_facts
from candle_p1.distributed.comm import NODE_VARIABLE, connect
from candle_p1.errors import EXIT_CODE, CandleError, SetupError
from candle_p1.instrument.screen import Screen
from candle_p1.launch_layout import launch_layout
from candle_p1.node_checks import GIB, Needs, judge
from candle_p1.node_facts import NodeFacts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from candle_p1.distributed.comm import Communicator
    from candle_p1.doctor import Finding
    from candle_p1.launch_layout import LaunchedRank

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

    Start it by the job's launcher, ahead of the job: srun python -m candle_p1.preflight
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
        layout = launch_layout()
        needs = _parse(arguments, layout.rank)
        comm = connect()
    except CandleError as error:  # perhaps on this node alone: the others wait for this rank
        node = os.environ.get(NODE_VARIABLE) or platform.node()
        print(f"error: node {node}: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
    try:
        check_ranks(layout, comm)
        findings = examine(comm, needs, _node_name(layout))
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


def check_ranks(layout: LaunchedRank, comm: Communicator) -> None:
    """Raises if MPI does not know the ranks that the launcher started; collective.

    Raises:
        SetupError: It does not: as a rule each process takes itself for the only one.
    """
    wrong = layout.size not in (None, comm.size) or layout.rank != comm.rank
    of = "" if layout.size is None else f" of {layout.size}"
    problems = comm.allgather(
        f"node {layout.node}: {layout.launcher} started this process as rank {layout.rank}{of}, and"
        f" MPI has it as rank {comm.rank} of {comm.size}: this MPI library does not belong to the"
        " launcher. Start with the launcher of that MPI, choose another interface (srun"
        " --mpi=pmix; srun --mpi=list names what there is), or rebuild against the machine's MPI:"
        " make setup MPI=system"
        if wrong
        else None
    )
    found = [problem for problem in problems if problem is not None]
    if found:
        error = SetupError(found[0])
        raise error.on_all_ranks() if comm.size > 1 else error


def examine(comm: Communicator, needs: Needs, node: str) -> list[Finding]:
    """Examines every node; collective.

    Args:
        comm: The ranks of the job, or one of each node.
        needs: What the job needs.
        node: The name of this rank's node.

    Returns:
        What the checks found, nothing of it fatal; the same on every rank.

    Raises:
        SetupError: A node lacks something; one error for all nodes, the same on every rank.
    """
    gathered = comm.gather(find_facts(comm, needs, node))
    findings: list[Finding] = comm.broadcast([] if gathered is None else judge(gathered, needs))
    fatal = [f"{finding.problem}. Fix: {finding.fix}" for finding in findings if finding.fatal]
    if fatal:
        lines = fatal if len(fatal) == 1 else [f"{len(fatal)} checks of the nodes failed", *fatal]
        raise SetupError("\n  ".join(lines)).on_all_ranks()
    return findings


def find_facts(comm: Communicator, needs: Needs, node: str) -> NodeFacts:
    """Returns what this rank finds on its node; collective, as all look at their clocks."""
    wall_s, monotonic_s = time.time(), time.monotonic()
    facts: dict[str, Any] = {
        **node_facts.find_software(with_mpi=comm.size > 1),
        **node_facts.find_rooms({"results": needs.output, "data": needs.data}),
        "files": node_facts.find_files(needs.files),
    }
    comm.barrier()
    now_s, later_s = time.time(), time.monotonic()
    return NodeFacts(
        rank=comm.rank,
        node=node,
        local_rank=comm.local_rank,
        local_size=comm.local_size,
        wall_s=now_s,
        step_s=(now_s - wall_s) - (later_s - monotonic_s),
        **facts,
    )


def show(findings: Sequence[Finding], layout: LaunchedRank, screen: Screen) -> None:
    """Shows the findings as one table."""
    screen.say(f"{'launcher':<15} {layout.launcher}")
    for finding in findings:
        screen.say(f"{finding.name:<15} {finding.value}")
        if finding.problem:
            screen.warn(f"{finding.problem}. Fix: {finding.fix}")
    screen.say("the nodes have what the job needs")


def _parse(arguments: Sequence[str] | None, rank: int) -> Needs:
    """Returns what the arguments ask for; one rank speaks, also for --help, which ends here."""
    silence = io.StringIO()
    try:
        with contextlib.redirect_stdout(silence) if rank else contextlib.nullcontext():
            parsed = command.main(
                arguments, prog_name="python -m candle_p1.preflight", standalone_mode=False
            )
    except click.ClickException as error:
        if rank != 0:
            sys.exit(0)
        error.show()
        sys.exit(error.exit_code)
    if not isinstance(parsed, Needs):  # --help
        sys.exit(0)
    return parsed


def _node_name(layout: LaunchedRank) -> str:
    return os.environ.get(NODE_VARIABLE) or layout.node


if __name__ == "__main__":
    main()
