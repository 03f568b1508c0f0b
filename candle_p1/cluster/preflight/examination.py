"""The examination of a job's nodes: all ranks tell what they find, and rank 0 judges."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from candle_p1.cluster.preflight import facts
from candle_p1.cluster.preflight.checks import judge
from candle_p1.cluster.preflight.facts import NodeFacts
from candle_p1.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.cluster.doctor import Finding
    from candle_p1.cluster.preflight.checks import Needs
    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.launch_environment import LaunchedRank
    from candle_p1.training.screen import Screen


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
    found: dict[str, Any] = {
        **facts.find_software(with_mpi=comm.size > 1),
        **facts.find_rooms({"results": needs.output, "data": needs.data}),
        "files": facts.find_files(needs.files),
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
        **found,
    )


def show(findings: Sequence[Finding], layout: LaunchedRank, screen: Screen) -> None:
    """Shows the findings as one table."""
    screen.say(f"{'launcher':<15} {layout.launcher}")
    for finding in findings:
        screen.say(f"{finding.name:<15} {finding.value}")
        if finding.problem:
            screen.warn(f"{finding.problem}. Fix: {finding.fix}")
    screen.say("the nodes have what the job needs")
