"""Machines: what their nodes have, and how jobs are submitted to them. One TOML file per machine.

A machine is called by the name of its file. A user's files take precedence over those that come
with this package, and need to hold only what differs::

    base = "slurm"
    title = "our cluster"
    cores_per_node = 64
    ranks_per_node = 4
    cores_per_rank = 16
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeInt

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.files import expand_user
from candle_p1.text import count
from candle_p1.toml_file import TomlTable, read_toml, validate

OURS = Path(__file__).resolve().parent / "machines"
DIRECTORY_VARIABLE = "CANDLE_P1_MACHINES"
"""Environment variable that names directories of machine files, separated by ":"."""


def _ascending(pairs: list[list[int]]) -> list[list[int]]:
    if pairs != sorted(pairs):
        raise ValueError(f"the pairs [nodes, minutes] {pairs} are not in ascending order")
    return pairs


Pair = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]
QueueLimits = Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3)]
CoreRange = Annotated[str, Field(pattern=r"^\d+-\d+$")]


class Container(TomlTable):
    """How a machine runs containers."""

    runtime: str = "apptainer"  # What runs them: a name in candle_p1.cluster.job.RUNTIMES
    options: list[str] = Field(default_factory=list)  # Its options; bash expands "$" in them
    setup: list[str] = Field(default_factory=list)  # Lines of bash that a job runs before


class Machine(TomlTable):
    """A machine. None means unknown, or left to the scheduler; it is not checked."""

    name: str  # What ``--machine`` calls it; the name of its file
    title: str  # What people call it
    scheduler: str  # A name in candle_p1.cluster.schedulers.SCHEDULERS
    launcher: str  # What starts ranks: a name in candle_p1.cluster.launchers.COMMAND_LINES
    ranks_per_node: NonNegativeInt  # Ranks on each node, unless a job asks for another number
    num_nodes: NonNegativeInt | None = None  # The most nodes of one job
    cores_per_node: NonNegativeInt | None = None  # Cores that a job can use
    # The numbers of the cores of each socket that a job can use, such as "1-51", for
    # launchers that bind ranks to lists of cores; needed where some cores are reserved.
    sockets: list[CoreRange] = Field(default_factory=list)
    cpus_per_core: NonNegativeInt = 1  # As the launcher counts: 2 where hardware threads count
    gpus_per_node: NonNegativeInt = 0  # GPUs as a program sees them: a GCD or a tile counts as one
    cores_per_rank: NonNegativeInt | None = None  # Cores of each rank
    gpus_per_rank: NonNegativeInt = 0  # GPUs of each rank
    # Which of a node's GPUs a rank sees, as --gpu-bind of Slurm's srun: "none" shows all,
    # which NCCL needs to reach the others directly; ranks take theirs by local rank.
    gpu_binding: str = "none"
    threads_per_rank: NonNegativeInt | None = None  # OMP_NUM_THREADS of each rank
    launcher_options: list[str] = Field(default_factory=list)  # Further arguments of the launcher
    project_required: bool = False  # Whether jobs have to be charged to a project
    queue: str | None = None  # The default queue; None leaves the choice to the scheduler
    queue_option: str | None = None  # What names the queue, where it is unusual
    # Whether jobs share nodes, so that each has to request its cores and GPUs (used with PBS;
    # the other schedulers always know).
    shared_nodes: bool = False
    directives: list[str] = Field(default_factory=list)  # Further ones, without the prefix
    minutes: NonNegativeInt = 60  # Default time limit of a job, in minutes
    min_nodes: NonNegativeInt = 1  # Fewest nodes of a job in the default queue
    # Pairs of nodes and minutes, ascending: the longest time limit in the default queue of
    # jobs with at most that many nodes.
    time_limits: Annotated[list[Pair], AfterValidator(_ascending)] = Field(default_factory=list)
    # Other queues: the fewest nodes, the most nodes and the longest time limit in minutes.
    queues: dict[str, QueueLimits] = Field(default_factory=dict)
    modules: list[str] = Field(default_factory=list)  # Environment modules that a job loads
    setup: list[str] = Field(default_factory=list)  # Lines of bash that a job runs after that
    # Environment variables of a job, which the user's own override; bash expands "$" in them.
    environment: dict[str, str] = Field(default_factory=dict)
    container: Container = Container()  # How it runs containers
    local_storage: str | None = None  # A directory on a node's own storage, in bash
    sources: dict[str, str] = Field(default_factory=dict)  # Where each value comes from

    def limits(self, queue: str | None, num_nodes: int) -> tuple[int, int | None, int | None]:
        """Returns the fewest and most nodes of a queue's jobs, and their longest time in minutes.

        That may depend on the nodes of the job. Nothing limits an unknown queue.
        """
        if queue != self.queue:
            fewest, most, longest = self.queues.get(queue or "", (0, None, None))
            return fewest, most, longest
        times = (minutes for nodes, minutes in self.time_limits if num_nodes <= nodes)
        return self.min_nodes, self.num_nodes, next(times, None)


def load_machine(name: str) -> Machine:
    """Returns a machine by its name, or by the path of a file.

    A name is looked up in the directories of $CANDLE_P1_MACHINES, in
    ``~/.config/candle_p1/machines``, and among the machines of this package. A user's file
    overrides the machine of this package that it names as ``base``, or that has the same name.

    Raises:
        ParameterError: There is no such machine, or its file is wrong.
    """
    if name.endswith(".toml"):
        return _read(expand_user(name))
    known = list_machines()
    for directory in [*_user_directories(), OURS] if name in known else []:
        path = directory / f"{name}.toml"
        if path.exists():
            return _read(path)
    raise ParameterError(
        f"there is no machine {reprlib.repr(name)}{did_you_mean(name, known)}; known here:"
        f" {', '.join(known)}. Describe another one in a file: --machine FILE.toml, or a file in"
        f" ${DIRECTORY_VARIABLE}"
    )


def list_machines() -> list[str]:
    """Returns the names of all machines that are known here."""
    directories = [*_user_directories(), OURS]
    return sorted({path.stem for directory in directories for path in directory.glob("*.toml")})


def _read(path: Path) -> Machine:
    content = read_toml(path)
    is_users = path.parent != OURS and (OURS / path.name).is_file()
    base = content.pop("base", path.stem if is_users else None)
    if base is not None:
        known = sorted(file.stem for file in OURS.glob("*.toml"))
        if base not in known:
            near = did_you_mean(str(base), known)
            raise ParameterError(
                f"{path}: base is {reprlib.repr(base)}{near}; choose one of {', '.join(known)}"
            )
        below = read_toml(OURS / f"{base}.toml")
        for key, value in below.items():  # inner tables are merged, lists are replaced
            both = isinstance(value, dict) and isinstance(content.get(key), dict)
            content[key] = value | content[key] if both else content.get(key, value)
    return validate(Machine, {"name": path.stem} | content, path)


def _user_directories() -> list[Path]:
    named = os.environ.get(DIRECTORY_VARIABLE, "").split(os.pathsep)
    config = expand_user(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    return [*(Path(directory) for directory in named if directory), config / "candle_p1/machines"]


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
