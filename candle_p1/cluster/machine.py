"""Machines: what their nodes have, and how jobs get onto them. Read from TOML, a file per machine.

A machine is known by the name of its file. Files of the user go before those that come with this
package, and need hold only what differs::

    base = "slurm"
    title = "our cluster"
    cores_per_node = 64
    ranks_per_node = 4
    cores_per_rank = 16
"""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.toml_file import (
    COUNT,
    SWITCH,
    TABLE_OF_TEXTS,
    TEXT,
    TEXTS,
    Kind,
    check_key,
    check_value,
    is_count,
    read_toml,
)

DIRECTORY_VARIABLE = "CANDLE_P1_MACHINES"
"""Names directories of machine files, separated by ":"."""


def _are_pairs(value: object) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
        and all(is_count(number) for pair in value for number in pair)
        and value == sorted(value)
    )


_KINDS = {
    "str": TEXT,
    "int": COUNT,
    "bool": SWITCH,
    "list[str]": TEXTS,
    "list[list[int]]": Kind(_are_pairs, "a list of pairs [nodes, minutes], ascending"),
    "dict[str, str]": TABLE_OF_TEXTS,
}
"""By the annotations of a machine's attributes."""


@dataclass(frozen=True)
class Machine:
    """A machine. What is None is not known, or left to the scheduler, and not checked.

    Attributes:
        name: What ``--machine`` calls it; the name of its file.
        title: What people call it.
        scheduler: Takes its jobs: a name in candle_p1.cluster.schedulers.SCHEDULERS.
        launcher: Starts ranks within a job: a name in candle_p1.cluster.launchers.LAUNCHERS.
        ranks_per_node: Ranks on each node, unless a job asks otherwise.
        num_nodes: Nodes that one job can have.
        cores_per_node: Cores that a job can use.
        cpus_per_core: What the launcher counts as CPUs of a core: 2 where hardware threads count.
        gpus_per_node: GPUs as a program sees them: a GCD or a tile is one.
        memory_gb: Memory of a node, in GB.
        cores_per_rank: Cores of each rank.
        gpus_per_rank: GPUs of each rank.
        threads_per_rank: OMP_NUM_THREADS of each rank.
        launcher_options: Further words after the launcher's name.
        project_required: Jobs are charged to a project, which the user has to name.
        queue: The queue of jobs that name none; None leaves the choice to the scheduler.
        queue_option: The option that names the queue, where it is not the scheduler's usual one.
        shared_nodes: Whether jobs share nodes, so that each asks for its cores and GPUs (of the
            schedulers, PBS does not otherwise).
        directives: Further directives of a job, without the scheduler's mark.
        minutes: Time limit of jobs that name none, in minutes.
        min_nodes: Fewest nodes of a job in the default queue.
        time_limits: Pairs of nodes and minutes: the most time that jobs of up to so many nodes get
            in the default queue; ascending.
        modules: Environment modules that a job loads.
        setup: Lines of bash that a job runs after loading them.
        environment: Environment variables of a job that the user's own ones override.
        local_storage: Directory on a node's own storage, as bash expands it in a job.
        power: What can read a node's power, by the names of ``--power``.
        sources: Where each of these values is from, by attribute.
    """

    name: str
    title: str
    scheduler: str
    launcher: str
    ranks_per_node: int
    num_nodes: int | None = None
    cores_per_node: int | None = None
    cpus_per_core: int = 1
    gpus_per_node: int = 0
    memory_gb: int | None = None
    cores_per_rank: int | None = None
    gpus_per_rank: int = 0
    threads_per_rank: int | None = None
    launcher_options: list[str] = field(default_factory=list)
    project_required: bool = False
    queue: str | None = None
    queue_option: str | None = None
    shared_nodes: bool = False
    directives: list[str] = field(default_factory=list)
    minutes: int = 60
    min_nodes: int = 1
    time_limits: list[list[int]] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    local_storage: str | None = None
    power: str | None = None
    sources: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_table(cls, table: dict[str, Any], path: Path) -> Machine:
        """Returns the machine that a file describes.

        Args:
            table: What the file holds, with "name" added.
            path: The file, for messages.

        Raises:
            ParameterError: A key is unknown or missing, or a value is not of its type.
        """
        declared = {entry.name: entry for entry in fields(cls)}
        for key, value in table.items():
            check_key(path, key, declared)
            kind = _KINDS[str(declared[key].type).removesuffix(" | None")]
            check_value(path, key, value, kind)
        for key, entry in declared.items():
            optional = entry.default is not MISSING or entry.default_factory is not MISSING
            if key not in table and not optional:
                raise ParameterError(f"{path}: {key} is missing")
        return cls(**table)

    def longest_minutes(self, num_nodes: int) -> int | None:
        """Returns the most time a job of so many nodes gets in the default queue, in minutes."""
        return next((time for nodes, time in self.time_limits if num_nodes <= nodes), None)


def load_machine(name: str) -> Machine:
    """Returns a machine by its name, or by the path of a file.

    A name is looked up in the directories of $CANDLE_P1_MACHINES, in
    ``~/.config/candle_p1/machines``, and among the machines of this package. A file of the user
    completes the one of this package that it names as ``base``, or that has its name.

    Raises:
        ParameterError: There is no such machine, or its file is wrong.
    """
    if name.endswith(".toml"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ParameterError(f"machine {name}: there is no such file")
        return _read(path)
    for directory in [*_user_directories(), _own_directory()]:
        path = directory / f"{name}.toml"
        if path.is_file():
            return _read(path)
    known = list_machines()
    raise ParameterError(
        f"there is no machine {name!r}{did_you_mean(name, known)}; known here: {', '.join(known)}."
        f" Another one is described by a file: --machine FILE.toml, or a file in"
        f" ${DIRECTORY_VARIABLE}"
    )


def list_machines() -> list[str]:
    """Returns the names of all machines that are known here."""
    directories = [*_user_directories(), _own_directory()]
    return sorted({path.stem for directory in directories for path in directory.glob("*.toml")})


def _read(path: Path) -> Machine:
    table = read_toml(path)
    base = table.pop("base", None)
    own = _own_directory()
    if base is None and path.parent != own and (own / path.name).is_file():
        base = path.stem
    if base is not None:
        below = own / f"{base}.toml"
        if not below.is_file():
            known = sorted(file.stem for file in own.glob("*.toml"))
            raise ParameterError(
                f"{path}: base is {base!r}{did_you_mean(str(base), known)}; choose one of"
                f" {', '.join(known)}"
            )
        table = _merge(read_toml(below), table)
    return Machine.from_table({"name": path.stem} | table, path)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Returns a table with another one put over it; tables within are merged, lists replaced."""
    merged = below | above
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = below[key] | value
    return merged


def _user_directories() -> list[Path]:
    named = os.environ.get(DIRECTORY_VARIABLE, "").split(os.pathsep)
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [*(Path(directory) for directory in named if directory), config / "candle_p1/machines"]


def _own_directory() -> Path:
    return Path(__file__).resolve().parent / "machines"
