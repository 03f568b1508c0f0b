"""Which launcher started this process, and as which of its ranks; from the environment alone.

No MPI is loaded, so this also works before MPI does, and where it does not: a launcher whose ranks
MPI does not know is a common failure, which candle_p1.cluster.preflight finds by this.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NOT_LAUNCHED = "none"
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm's step ids from here on are no `srun` of the user: 0xFFFFFFFB is the batch script,
0xFFFFFFFA the shell of an interactive job (slurm/slurm.h, SLURM_BATCH_SCRIPT and its kin)."""


@dataclass(frozen=True)
class LaunchedRank:
    """A process's place among those that a launcher started.

    Attributes:
        launcher: "none" for a process that no launcher started; else a name of `LAUNCHERS`.
        rank: This rank, from 0.
        size: The number of ranks; None where the launcher does not tell.
        local_rank: This rank within its node, from 0; None where the launcher does not tell.
        local_size: The ranks of this node; None where the launcher does not tell.
        depth: The cores that were asked for each rank; None where the launcher does not tell.
        node: The node's name, as the scheduler or the operating system has it.
    """

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None
    depth: int | None
    node: str


def _always(environ: Mapping[str, str]) -> bool:
    return True


@dataclass(frozen=True)
class Launcher:
    """The variables a launcher sets for each process; of several names, the first that is set.

    Attributes:
        name: As it stands in records.
        rank: All of these must be set; the first holds the rank.
        size: Of the job, or of the step within it.
        local_rank: Within the node.
        local_size: Of the node.
        depth: Cores for each rank.
        node: The node's name.
        started: Whether these variables are a rank's, or come from around it.
        count_here: Reads the node's ranks where no variable holds just their number.
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    depth: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    started: Callable[[Mapping[str, str]], bool] = _always
    count_here: Callable[[Mapping[str, str]], int | None] | None = None


def _is_task_of_a_step(environ: Mapping[str, str]) -> bool:
    """Tells a task that srun started from a batch script or the shell of an interactive job.

    These too have SLURM_PROCID=0 and the SLURM_NTASKS that the job asked for. What they lack is the
    number of a step of their own: SLURM_STEP_ID is absent in a batch script, and in the shell of
    `salloc` one of Slurm's special ids.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < FIRST_SPECIAL_STEP


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Reads Slurm's tasks per node, such as "4(x3),2", at this node's place among the step's."""
    text, place = environ.get("SLURM_STEP_TASKS_PER_NODE"), environ.get("SLURM_NODEID", "")
    if text is None or not place.isdigit():
        return None
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[int(place)] if int(place) < len(counts) else None


LAUNCHERS = (
    # jsrun of LSF (Summit). Its Spectrum MPI sets Open MPI's names as well, so it is asked first.
    Launcher(
        "jsrun",
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    # Open MPI, Spectrum MPI's mpirun. Within a job of Slurm or PALS its daemons are started by
    # these, and hand on variables that are not the rank's own: the inner launcher comes first.
    Launcher(
        "mpirun",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # mpiexec of HPE's PALS (Polaris, Aurora).
    Launcher(
        "mpiexec_pals",
        rank=("PALS_RANKID",),
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    # mpiexec of MPICH and of Intel MPI (Hydra).
    Launcher(
        "mpiexec_mpich",
        rank=("PMI_RANK", "MPI_LOCALRANKID"),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    # aprun of Cray's ALPS (Theta).
    Launcher("aprun", rank=("ALPS_APP_PE",), depth=("ALPS_APP_DEPTH",)),
    # srun (Frontier, Perlmutter), whichever of --mpi=pmix, pmi2, cray_shasta or none.
    Launcher(
        "srun",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        depth=("SLURM_CPUS_PER_TASK",),
        node=("SLURMD_NODENAME",),
        started=_is_task_of_a_step,
        count_here=_tasks_here,
    ),
    # What else speaks PMI or PMIx.
    Launcher(
        "pmi",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK",),
        local_size=("PMI_LOCAL_SIZE",),
    ),
    Launcher("pmix", rank=("PMIX_RANK",)),
)
"""Asked one after the other; the first whose variables are set has started this process."""


def launch_layout(environ: Mapping[str, str] | None = None) -> LaunchedRank:
    """Returns this process's place among those that a launcher started.

    Args:
        environ: The environment; None is this process's.

    Raises:
        SetupError: A launcher's variable is not a number.
    """
    environ = os.environ if environ is None else environ
    for launcher in LAUNCHERS:
        if all(name in environ for name in launcher.rank) and launcher.started(environ):
            return _read(launcher, environ)
    return LaunchedRank(NOT_LAUNCHED, 0, 1, 0, 1, None, platform.node())


def _read(launcher: Launcher, environ: Mapping[str, str]) -> LaunchedRank:
    def number(names: tuple[str, ...]) -> int | None:
        name = next((name for name in names if name in environ), None)
        if name is None:
            return None
        if not environ[name].isdigit():
            raise SetupError(
                f"{name}={environ[name]!r}, which {launcher.name} sets, is not a number: start the"
                " ranks by the launcher itself, without setting its variables"
            )
        return int(environ[name])

    rank = number(launcher.rank[:1])
    assert rank is not None
    return LaunchedRank(
        launcher=launcher.name,
        rank=rank,
        size=number(launcher.size),
        local_rank=number(launcher.local_rank),
        local_size=number(launcher.local_size)
        if launcher.count_here is None
        else launcher.count_here(environ),
        depth=number(launcher.depth),
        node=next((environ[name] for name in launcher.node if name in environ), platform.node()),
    )
