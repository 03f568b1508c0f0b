"""Examining a job's nodes: all ranks collect facts, and rank 0 checks them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from candle_p1.cluster.preflight import facts
from candle_p1.cluster.preflight.checks import check_facts
from candle_p1.cluster.preflight.facts import NodeFacts
from candle_p1.errors import SetupError

if TYPE_CHECKING:
    from candle_p1.cluster.doctor import Finding
    from candle_p1.cluster.preflight.checks import Needs
    from candle_p1.distributed.comm import Communicator


def examine(comm: Communicator, needs: Needs, node: str) -> list[Finding]:
    """Examines every node; collective.

    Args:
        comm: The ranks of the job, or one rank of each node.
        needs: What the job needs.
        node: The name of this rank's node.

    Returns:
        The findings, none of which is fatal; the same on every rank.

    Raises:
        SetupError: A node lacks something. The error covers all nodes and is the same on all ranks.
    """
    gathered = comm.gather(find_facts(comm, needs, node))
    findings: list[Finding] = comm.broadcast(
        [] if gathered is None else check_facts(gathered, needs)
    )
    fatal = [f"{finding.problem}. Fix: {finding.fix}" for finding in findings if finding.fatal]
    if fatal:
        lines = fatal if len(fatal) == 1 else [f"the nodes failed {len(fatal)} checks", *fatal]
        raise SetupError("\n  ".join(lines)).on_all_ranks()
    return findings


def find_facts(comm: Communicator, needs: Needs, node: str) -> NodeFacts:
    """Returns the facts of this rank's node; collective, because all read their clocks together."""
    wall_s, monotonic_s = time.time(), time.monotonic()
    found: dict[str, Any] = {
        **facts.find_software(with_mpi=comm.size > 1),
        "space": facts.find_space({"results": needs.output, "data": needs.data}),
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
