"""How the ranks of a job lie on its nodes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from candle_p1.errors import ParameterError
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.cluster.machine import Machine


@dataclass(frozen=True)
class Layout:
    """The ranks of a job on its nodes.

    Attributes:
        num_nodes: Nodes.
        ranks_per_node: Ranks on each node.
        cores_per_rank: Cores of each rank; None leaves them to the launcher.
        cpus_per_core: What the launcher counts as CPUs of a core.
        gpus_per_rank: GPUs of each rank.
        threads_per_rank: OMP_NUM_THREADS of each rank; None leaves it to the rank.
        environment: Environment variables that the launcher is told to give to the ranks.
        nodes: The word that stands for the number of nodes in a command line.
        ranks: The word that stands for the number of ranks.
        exported: Further variables of the script's environment that ranks need, for a launcher that
            hands on only what it is told to.
    """

    num_nodes: int
    ranks_per_node: int
    cores_per_rank: int | None = None
    cpus_per_core: int = 1
    gpus_per_rank: int = 0
    threads_per_rank: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: str = ""
    ranks: str = ""
    exported: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", self.nodes or str(self.num_nodes))
        object.__setattr__(self, "ranks", self.ranks or str(self.num_ranks))

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.num_nodes * self.ranks_per_node

    @classmethod
    def on(cls, machine: Machine, num_nodes: int, ranks_per_node: int | None = None) -> Layout:
        """Returns the layout of a job on a machine.

        Ranks get the machine's usual share of a node, and a smaller one where there are more of
        them than usual.

        Args:
            machine: The machine.
            num_nodes: Nodes of the job.
            ranks_per_node: Ranks on each; None is the machine's usual number.

        Raises:
            ParameterError: The machine does not have so many nodes, cores or GPUs.
        """
        ranks = machine.ranks_per_node if ranks_per_node is None else ranks_per_node
        if num_nodes < 1 or ranks < 1:
            raise ParameterError(
                f"{num_nodes} nodes of {ranks} ranks: a job has at least one of each"
            )
        if machine.num_nodes is not None and num_nodes > machine.num_nodes:
            raise ParameterError(
                f"{count(num_nodes, 'node')}: a job on {machine.name} can have at most"
                f" {machine.num_nodes:,}"
            )
        gpus, there = machine.gpus_per_rank, machine.gpus_per_node
        if ranks * gpus > there:
            raise ParameterError(
                f"{ranks} ranks per node on {machine.name}: each takes {count(gpus, 'GPU')}, and"
                f" a node has {there}: at most {there // gpus} ranks"
            )
        cores, threads = machine.cores_per_rank, machine.threads_per_rank
        if machine.cores_per_node is not None:
            if ranks > machine.cores_per_node:
                raise ParameterError(
                    f"{ranks} ranks per node on {machine.name}: a node has"
                    f" {count(machine.cores_per_node, 'core')}"
                )
            if cores is not None and ranks * cores > machine.cores_per_node:
                if ranks <= machine.ranks_per_node:
                    raise ParameterError(
                        f"{machine.name}: {ranks} ranks of {count(cores, 'core')} are"
                        f" {ranks * cores}, and a node has {machine.cores_per_node}"
                    )
                smaller = machine.cores_per_node // ranks
                threads = None if threads is None else max(1, threads * smaller // cores)
                cores = smaller
        return cls(
            num_nodes=num_nodes,
            ranks_per_node=ranks,
            cores_per_rank=cores,
            cpus_per_core=machine.cpus_per_core,
            gpus_per_rank=gpus,
            threads_per_rank=threads,
            environment={} if threads is None else {"OMP_NUM_THREADS": str(threads)},
        )

    def in_script(self, exported: Sequence[str] = ()) -> Layout:
        """Returns the layout in the words of a job script, which learns its nodes when it runs."""
        return replace(
            self,
            environment={name: f"${name}" for name in self.environment},
            nodes="$NODES",
            ranks="$RANKS",
            exported=[name for name in exported if name not in self.environment],
        )

    def explain(self) -> str:
        """Returns the layout in words."""
        share = [
            count(number, unit)
            for number, unit in (
                (self.cores_per_rank, "core"),
                (self.gpus_per_rank, "GPU"),
                (self.threads_per_rank, "thread"),
            )
            if number
        ]
        each = f", each with {', '.join(share)}" if share else ""
        return f"{count(self.ranks_per_node, 'rank')} per node{each}"
