"""Counts what every rank receives in every phase of a run, at thousands of ranks in one process.

``make bench-scale``. The ranks are simulated (tools.simulated) and call the code of a run
(tools.simulated_run). Nothing is timed: messages and bytes depend on the number of ranks and nodes,
not on the machine. 4,096 ranks take minutes and 4 GB of memory.
"""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import click
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tools.simulated import SimulatedCommunicator, SimulatedJob
from tools.simulated_run import NUM_COLUMNS, NUM_ROWS, PHASES, RankOfRun, Scenario

KINDS = FIRST, LEADER, OTHER = "rank 0", "first rank of each other node", "other ranks"
NOTES = f"""\
The most that one rank of each kind receives in a phase, counted on simulated ranks.
The first rank of a node also receives the rows of the other nodes, here at most
{4 * NUM_ROWS * NUM_COLUMNS:,} bytes for each load.
Not counted: Horovod's broadcast of the model and allreduces of gradients, which TensorFlow calls;
the TCP connections to the watchdog server; what the MPI library itself sends."""


def count_traffic(num_ranks: int, ranks_per_node: int, directory: Path) -> SimulatedJob:
    """Returns a simulated job that has run all phases, with what its ranks received.

    Args:
        num_ranks: The number of ranks.
        ranks_per_node: Those of each node.
        directory: Where the run's files go.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # four files for each rank
    simulated = SimulatedJob(num_ranks, ranks_per_node)
    scenario = Scenario.make(directory, num_ranks)

    def run(comm: SimulatedCommunicator) -> None:
        rank = RankOfRun(scenario, comm)
        try:
            for phase, work in PHASES.items():
                with simulated.phase(phase, comm.rank):
                    work(rank)
        finally:
            rank.resources.close()

    simulated.run(run)
    return simulated


def largest(traffic: NDArray[np.int64], ranks_per_node: int) -> dict[str, NDArray[np.int64]]:
    """Returns the most messages and bytes that one rank received, by the kind of rank.

    A kind of which there is none is left out.
    """
    first_of_node = np.arange(len(traffic)) % ranks_per_node == 0
    by_kind = {
        FIRST: traffic[:1],
        LEADER: traffic[first_of_node][1:],
        OTHER: traffic[~first_of_node],
    }
    return {kind: found.max(axis=0) for kind, found in by_kind.items() if len(found)}


def count(num_ranks: int, ranks_per_node: int) -> pd.DataFrame:
    """Returns a row for each phase and kind of rank: its messages and bytes."""
    with tempfile.TemporaryDirectory(prefix="candle-p1-scale-") as name:
        job = count_traffic(num_ranks, ranks_per_node, Path(name))
    by_phase = job.traffic | {"all phases": np.sum([*job.traffic.values()], axis=0)}
    rows = [
        (kind, phase, num_ranks, *found)
        for phase, traffic in by_phase.items()
        if traffic.any() or phase in PHASES
        for kind, found in largest(traffic, ranks_per_node).items()
    ]
    return pd.DataFrame(rows, columns=["ranks", "phase", "num_ranks", "messages", "bytes"])


@click.command()
@click.option("--ranks", type=click.IntRange(1, 8192), multiple=True, default=(64, 512, 4096))
@click.option("--ranks_per_node", type=click.IntRange(1), default=8)
@click.option("--csv", type=click.Path(), help="Write all counts to this file.")
def main(ranks: tuple[int, ...], ranks_per_node: int, csv: str | None) -> None:
    """Count what ranks receive in every phase of a run; nothing is timed."""
    counted = pd.concat([count(num_ranks, ranks_per_node) for num_ranks in ranks])
    for kind, found in counted.groupby("ranks", sort=False):
        table = found.pivot(index="phase", columns="num_ranks", values=["messages", "bytes"])
        table = table.reindex(found["phase"].unique()).swaplevel(axis="columns")
        click.echo(
            f"{kind}\n{table.sort_index(axis='columns').to_string(float_format='{:,.0f}'.format)}\n"
        )
    click.echo(NOTES)
    if csv:
        counted.to_csv(csv, index=False)


if __name__ == "__main__":
    main()
