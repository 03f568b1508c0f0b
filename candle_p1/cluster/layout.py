"""How the ranks of a job are distributed over its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from candle_p1.cluster.machine import Machine
from candle_p1.errors import ParameterError
from candle_p1.text import count


@dataclass(frozen=True)
class Layout:
    """The ranks of a job on its nodes."""

    num_nodes: int  # The number of nodes
    ranks_per_node: int  # Ranks on each node
    cores_per_rank: int | None = None  # Cores of each rank; None leaves them to the launcher
    cpus_per_core: int = 1  # CPUs of a core, as the launcher counts them
    gpus_per_rank: int = 0  # GPUs of each rank
    gpu_binding: str = "none"  # Which of a node's GPUs a rank sees, as --gpu-bind of Slurm's srun
    # The cores of each rank of a node, such as "1-8"; empty leaves them to the launcher.
    core_ranges: Sequence[str] = ()
    threads_per_rank: int | None = None  # OMP_NUM_THREADS of each rank; None leaves it to the rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def cpus_per_rank(self) -> int | None:
        """CPUs of each rank, as the launcher counts them."""
        return None if self.cores_per_rank is None else self.cores_per_rank * self.cpus_per_core

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node that ranks use."""
        return self.gpus_per_rank * self.ranks_per_node

    @classmethod
    def on(cls, machine: Machine, num_nodes: int, ranks_per_node: int | None = None) -> Layout:
        """Returns the layout of a job on a machine, by default with its usual ranks per node.

        Ranks get the machine's usual share of a node, or a smaller one if there are more ranks
        than usual. Raises ParameterError if there are not as many nodes, cores or GPUs.
        """
        ranks = machine.ranks_per_node if ranks_per_node is None else ranks_per_node
        cores, threads = machine.cores_per_rank, machine.threads_per_rank
        gpus, there, most = machine.gpus_per_rank, machine.gpus_per_node, machine.cores_per_node
        here, problem = f"{ranks} ranks per node on {machine.name}", None
        if num_nodes < 1 or ranks < 1:
            problem = f"{num_nodes} nodes with {ranks} ranks each: a job needs at least one of both"
        elif machine.num_nodes is not None and num_nodes > machine.num_nodes:
            few = f"a job on {machine.name} can have at most {machine.num_nodes:,}"
            problem = f"{count(num_nodes, 'node')}: {few}"
        elif ranks * gpus > there:
            enough = f"a node has {there}, enough for {count(there // gpus, 'rank')}"
            problem = f"{here}: each takes {count(gpus, 'GPU')}, and {enough}"
        elif most is not None and ranks > most:
            problem = f"{here}: a node has {count(most, 'core')}"
        elif most is not None and cores is not None and ranks * cores > most:
            if ranks <= machine.ranks_per_node:
                problem = (
                    f"{machine.name}: {ranks} ranks with {count(cores, 'core')} each need"
                    f" {ranks * cores} cores, and a node has {most}"
                )
            threads = None if threads is None else max(1, threads * (most // ranks) // cores)
            cores = most // ranks
        if problem is not None:
            raise ParameterError(problem)
        return cls(
            num_nodes=num_nodes,
            ranks_per_node=ranks,
            cores_per_rank=cores,
            cpus_per_core=machine.cpus_per_core,
            gpus_per_rank=gpus,
            gpu_binding=machine.gpu_binding,
            core_ranges=_core_ranges(machine, ranks, cores),
            threads_per_rank=threads,
        )

    def explain(self) -> str:
        """Returns a description for the user."""
        numbers = (self.cores_per_rank, self.gpus_per_rank, self.threads_per_rank)
        shares = zip(numbers, ("core", "GPU", "thread"), strict=True)
        share = ", ".join(count(number, unit) for number, unit in shares if number)
        return f"{count(self.ranks_per_node, 'rank')} per node" + (share and f", each with {share}")


def fill_in(options: Iterable[str], values: Mapping[str, object]) -> list[str]:
    """Returns options with their values, without those one of whose values is None."""
    return [
        option.format_map(values)
        for option in options
        if all(values[name] is not None for _, name, _, _ in Formatter().parse(option) if name)
    ]


def _core_ranges(machine: Machine, num_ranks: int, num_cores: int | None) -> tuple[str, ...]:
    """Returns the cores of each rank of a node; ranks fill the sockets evenly, in their order."""
    if num_cores is None or not machine.sockets:
        return ()
    per_socket = -(-num_ranks // len(machine.sockets))
    ranges: list[str] = []
    for rank in range(num_ranks):
        first, last = (int(core) for core in machine.sockets[rank // per_socket].split("-"))
        begin = first + rank % per_socket * num_cores
        end = begin + num_cores - 1
        if end > last:
            raise ParameterError(
                f"{num_ranks} ranks per node on {machine.name}, each with"
                f" {count(num_cores, 'core')}: a socket has {last - first + 1}; choose another"
                " --ranks_per_node"
            )
        ranges.append(f"{begin}-{end}")
    return tuple(ranges)
