"""Examines all nodes of a job before it starts: ``python -m candle_p1.cluster.preflight``.

The launcher starts it as it will start the job, with all ranks or with one per node. Every rank
collects facts about its node; rank 0 checks them, and shows one table, or one error that names the
nodes.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from candle_p1.cluster import checks
from candle_p1.cluster.checks import Finding, Needs, NodeFacts
from candle_p1.distributed.comm import Communicator, check_ranks, connect
from candle_p1.distributed.gpus import requested_gpus
from candle_p1.distributed.launch_environment import (
    NODE_VARIABLE,
    LaunchedRank,
    launched_rank,
    node_name,
)
from candle_p1.errors import EXIT_CODE, CandleError, SetupError
from candle_p1.options import FiniteRange
from candle_p1.text import print_error
from candle_p1.training.screen import Screen

CHECKS = (
    *(checks.check_ranks, checks.check_engine, checks.check_packages, checks.check_mpi),
    *(checks.check_gpus, checks.check_space, checks.check_files, checks.check_clocks),
)


def check_facts(facts: Sequence[NodeFacts], needs: Needs) -> list[Finding]:
    """Returns the findings of all checks, given the facts of all ranks in order."""
    return [finding for check in CHECKS for finding in check(facts, needs)]


def examine(comm: Communicator, needs: Needs, node: str) -> list[Finding]:
    """Examines every node, this rank's being `node`; collective.

    The ranks are those of the job, or one of each node. Returns findings that are not fatal, and
    raises SetupError if a node lacks something; both cover all nodes, on every rank the same.
    """
    gathered = comm.gather(_find_facts(comm, needs, node))
    findings: list[Finding] = comm.broadcast(
        [] if gathered is None else check_facts(gathered, needs)
    )
    fatal = [f"{finding.problem}. Fix: {finding.fix}" for finding in findings if finding.fatal]
    if fatal:
        lines = fatal if len(fatal) == 1 else [f"the nodes failed {len(fatal)} checks", *fatal]
        raise SetupError("\n  ".join(lines)).on_all_ranks()
    return findings


def _find_facts(comm: Communicator, needs: Needs, node: str) -> NodeFacts:
    wall_s, monotonic_s = time.time(), time.monotonic()
    software = checks.find_software(with_mpi=comm.size > 1)
    space = checks.find_space({"results": needs.output, "data": needs.data})
    files = checks.find_files(needs.files)
    comm.barrier()  # all read their clocks together
    now_s, later_s = time.time(), time.monotonic()
    return NodeFacts(
        rank=comm.rank,
        node=node,
        local_rank=comm.local_rank,
        local_size=comm.local_size,
        space=space,
        files=files,
        wall_s=now_s,
        step_s=(now_s - wall_s) - (later_s - monotonic_s),
        **software,
    )


def _option(kind: Any, text: str, flag: str, name: str = "") -> Callable[..., Any]:
    name = name or flag.removeprefix("--")
    default = getattr(Needs, name)
    shown: dict[str, Any] = {"show_default": bool(default), "multiple": isinstance(default, tuple)}
    return click.option(flag, name, type=kind, default=default, help=text, **shown)


AMOUNT, PATH = FiniteRange(min=0), click.Path(path_type=Path)
SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("-", "_"),  # as for candle-p1
}
GPUS = "GPUs that each node needs; default: what the job requested, or what most nodes have."
DISK = "GiB that must be free for results, and for data and caches in CANDLE_DATA_DIR."


@click.command("preflight", context_settings=SETTINGS)
@_option(PATH, "Directory for results.", "--output")
@_option(PATH, "A data file that every node must see; may be repeated.", "--file", "files")
@_option(click.IntRange(0), GPUS, "--gpus", "num_gpus")
@_option(AMOUNT, "GiB that must be free in /dev/shm.", "--shm_gib")
@_option(AMOUNT, "GiB of memory that must be available.", "--memory_gib")
@_option(AMOUNT, DISK, "--disk_gib")
@_option(AMOUNT, "Seconds by which a node's clock may be off.", "--clock_s")
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
    except CandleError as error:  # perhaps on this node alone, while the others wait for this rank
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
        finding.show(screen)
    screen.say("preflight passed")


def _end(error: CandleError, layout: LaunchedRank, comm: Communicator) -> NoReturn:
    """Exits after an error that all ranks have; one of them prints it."""
    # MPI may see each rank as the only one. aprun does not tell the number of ranks, so rank 0
    # cannot know that there are others.
    first = 0 if error.agreed or layout.size is not None else 1
    is_first = (comm.rank if error.agreed else layout.rank) == first
    if is_first:
        print_error(error)
    if error.agreed:
        comm.barrier()
    sys.exit(EXIT_CODE if is_first or error.agreed else 0)


def _parse(arguments: Sequence[str] | None, rank: int) -> Needs:
    """Returns the job's needs. Rank 0 prints --help and errors, after which all ranks exit."""
    program = "python -m candle_p1.cluster.preflight"
    code = 0
    try:
        with contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext():
            parsed = command.main(arguments, prog_name=program, standalone_mode=False)
        if isinstance(parsed, Needs):
            return parsed
    except click.ClickException as error:
        if rank == 0:
            error.show()
            code = error.exit_code
    sys.exit(code)
