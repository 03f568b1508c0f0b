"""What MPI launchers leave in the environment of the processes that they start, and users set.

No MPI is loaded, so this works before MPI does, and where MPI does not. A common failure, which
candle_p1.cluster.preflight detects, is that MPI does not recognise the ranks a launcher started.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf, nan
from typing import TypeVar, cast

from candle_p1.errors import SetupError
from candle_p1.failure.protocol import Limits
from candle_p1.text import WIDTH_VARIABLE

NOT_LAUNCHED = "none"
NODE_VARIABLE = "CANDLE_P1_NODE"
"""Names the node that a rank is considered part of, so that tests can have several nodes on one
machine: ranks with different names do not share memory."""
TERMINAL_VARIABLE = "CANDLE_P1_TERMINAL"
"""Set by a local launch to the device of the user's terminal: launchers forward only whole lines,
which is too late for a progress bar."""

SINGLE_PROCESS_VARIABLE = "CANDLE_P1_SINGLE_PROCESS"
"""If set, and not to 0, this process runs alone, without MPI, whatever launcher's variables it has.
What a rank of another MPI program starts inherits the rank's variables, but is no rank itself: it
would wait forever for MPI to initialize."""


Number = TypeVar("Number", bound=float)


def read_number(
    variable: str,
    default: Number,
    give: str,
    *,
    least: float = 0,
    most: float = inf,
    is_list: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Number:
    """Returns the number in a variable of the environment, or the default if it is not set.

    An empty variable is not set. Where the default is an integer, so is the number; of a list, the
    first number counts. `give` is what users have to give, for the message.

    Raises:
        SetupError: It is no number, or one outside of the limits.
    """
    text = (os.environ if environ is None else environ).get(variable, "").strip()
    if not text:
        return default
    number = nan
    with suppress(ValueError):
        number = type(default)(text.split(",")[0] if is_list else text)
    if not least <= number <= most:
        raise SetupError(f"{variable}={text!r}: give {give}")
    return cast("Number", number)


LIMIT_VARIABLES = {
    "stopped_s": "CANDLE_P1_STOPPED_S",
    "silent_s": "CANDLE_P1_SILENT_S",
    "hung_s": "CANDLE_P1_HUNG_S",
    "save_s": "CANDLE_P1_SAVE_S",
}
"""The variables that set the limits of the watchdog; 0 means no limit."""


def limits_from_environment() -> Limits:
    """Returns the limits of the watchdog, or raises SetupError if one is no number of seconds."""
    give, default = "a number of seconds; 0 means no limit", Limits()
    read = {
        name: read_number(variable, getattr(default, name), give)
        for name, variable in LIMIT_VARIABLES.items()
    }
    return Limits(**{name: seconds or inf for name, seconds in read.items()})


def is_single_process(environ: Mapping[str, str]) -> bool:
    """Returns whether this process must not look for a launcher."""
    return environ.get(SINGLE_PROCESS_VARIABLE, "0") not in ("", "0")


@dataclass(frozen=True)
class LaunchedRank:
    """A process's place among those that a launcher started. None: the launcher does not say."""

    launcher: str  # a name in `LAUNCHERS`, or "none"
    rank: int
    size: int | None
    local_rank: int | None  # within its node
    local_size: int | None
    depth: int | None  # how many cores were requested for each rank
    node: str  # its name, from the scheduler or the operating system
    seen: str = ""  # the variables that say so, with their values


@dataclass(frozen=True)
class Launcher:
    """The variables that a launcher sets for each process; of several names, the first that is set.

    See `LaunchedRank`. `started` tells whether the variables were set for this process and not
    inherited from its parents.
    """

    name: str  # in records, and in candle_p1.cluster.launchers.COMMAND_LINES
    rank: tuple[str, ...]  # all of these must be set; the first holds the rank
    size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    depth: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    implies_mpi: bool = True  # a process with any of these variables can be expected to find MPI
    started: Callable[[Mapping[str, str]], bool] = lambda environ: True
    count_local: Callable[[Mapping[str, str]], int | None] | None = None  # if no variable does


def _is_task_of_a_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, rather than the batch script or the shell around it.

    Those also have SLURM_PROCID=0 and the SLURM_NTASKS that the job requested, but no step of their
    own: SLURM_STEP_ID is absent in a batch script, and one of the special ids from 0xFFFFFFF0 on
    (SLURM_BATCH_SCRIPT and others in slurm/slurm.h) in the shell of `salloc`.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < 0xFFFFFFF0


def _count_local_tasks(environ: Mapping[str, str]) -> int | None:
    """Reads Slurm's tasks per node, such as "4(x3),2", at this node's index in the step."""
    text, index = environ.get("SLURM_STEP_TASKS_PER_NODE"), environ.get("SLURM_NODEID", "")
    if text is None or not index.isdigit():
        return None
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[int(index)] if int(index) < len(counts) else None


def _numbers(prefix: str) -> tuple[tuple[str], tuple[str], tuple[str], tuple[str]]:
    """Returns the variables of rank, size, local rank and local size, which differ in an ending."""
    local = f"{prefix}_LOCAL"
    return (f"{prefix}_RANK",), (f"{prefix}_SIZE",), (f"{local}_RANK",), (f"{local}_SIZE",)


LAUNCHERS = (
    # jsrun of LSF (Summit). Its Spectrum MPI also sets Open MPI's names, so it comes first.
    Launcher("jsrun", *_numbers("JSM_NAMESPACE")),
    # Open MPI, and Spectrum MPI's mpirun. Within a job of Slurm or PALS, these start its daemons,
    # which pass on variables that are not the rank's own: the inner launcher comes first.
    Launcher("mpirun", *_numbers("OMPI_COMM_WORLD")),
    # mpiexec of HPE's PALS (Polaris, Aurora). On Cray EX, Slurm's plug-in cray_shasta gives srun's
    # tasks these variables, too.
    Launcher(
        "mpiexec_pals",
        rank=("PALS_RANKID",),
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        started=lambda environ: not _is_task_of_a_step(environ),
    ),
    # mpiexec of MPICH and of Intel MPI (Hydra).
    Launcher(
        "mpiexec_mpich",
        rank=("PMI_RANK", "MPI_LOCALRANKID"),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    # Horovod's own launcher, over Gloo, without MPI.
    Launcher("horovodrun", rank=("HOROVOD_RANK",), size=("HOROVOD_SIZE",), implies_mpi=False),
    # aprun of Cray's ALPS (Theta).
    Launcher("aprun", rank=("ALPS_APP_PE",), depth=("ALPS_APP_DEPTH",)),
    # srun (Frontier, Perlmutter), with any of --mpi=pmix, pmi2, cray_shasta or none.
    Launcher(
        "srun",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        depth=("SLURM_CPUS_PER_TASK",),
        node=("SLURMD_NODENAME",),
        implies_mpi=False,
        started=_is_task_of_a_step,
        count_local=_count_local_tasks,
    ),
    # Anything else that speaks PMI or PMIx.
    Launcher("pmi", *_numbers("PMI")),
    Launcher("pmix", rank=("PMIX_RANK",)),
)
"""In the order in which they are looked for; the first one found started this process."""

MPI_VARIABLES = tuple(
    dict.fromkeys(
        name
        for launcher in LAUNCHERS
        if launcher.implies_mpi
        for name in (*launcher.rank, *launcher.size)
    )
)


ALLOCATION = re.compile(
    "(?:SLURMD?|SRUN|PBS|LSB|JSM|COBALT|ALPS|PALS|PMI|PMIX|PRTE)_|LS_JOBPID|MPI_LOCAL"
    "|OMPI_(?:COMM_WORLD|UNIVERSE|WORLD|FILE)_|HOROVOD_(?:RANK|SIZE|LOCAL|CROSS)"
)
"""What the names of variables begin with that describe an allocation, a step or a rank."""
OF_USERS = re.compile(
    ".*_(?:MCA_.*|PREFIX)|SLURM_(?:CONF|CLUSTERS|JWT|MPI_TYPE)|PBS_(?:CONF_FILE|DEFAULT|EXEC|SERVER)"
    "|LSB_DEFAULT.*"
)
"""Variables that begin likewise, but that users and sites set."""


def without_allocation(environ: Mapping[str, str], *, here: bool = False) -> dict[str, str]:
    """Returns the environment without what describes the allocation that this process is in.

    It is for another job or, `here`, for ranks on this node, which the launcher would otherwise
    spread over the allocation, and which keep its number of GPUs.
    """
    gone = {n for n in environ if ALLOCATION.match(n) and not OF_USERS.fullmatch(n)}
    if here:
        gone.discard("SLURM_GPUS_ON_NODE")
    elif gone:  # schedulers set these to the GPUs of an allocation on its node
        gone |= {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
    return {name: value for name, value in environ.items() if name not in gone}


def launcher_variable() -> str | None:
    """Returns the name of a variable that only MPI launchers set; None if none is set.

    srun's own variables do not count, because it also starts processes without MPI.
    """
    if is_single_process(os.environ):
        return None
    return next((name for name in MPI_VARIABLES if name in os.environ), None)


def launched_rank(environ: Mapping[str, str] | None = None) -> LaunchedRank:
    """Returns this process's place among those that a launcher started.

    Raises SetupError if a launcher's variable is not a number.
    """
    environ = os.environ if environ is None else environ
    for launcher in () if is_single_process(environ) else LAUNCHERS:
        if all(name in environ for name in launcher.rank) and launcher.started(environ):
            return _read(launcher, environ)
    return LaunchedRank(NOT_LAUNCHED, 0, 1, 0, 1, None, platform.node())


def node_name() -> str:
    """Returns the name of this rank's node, or raises SetupError as `launched_rank`."""
    return os.environ.get(NODE_VARIABLE) or launched_rank().node


def _read(launcher: Launcher, environ: Mapping[str, str]) -> LaunchedRank:
    sizes = [name for name in launcher.size if name in environ]

    def number(names: tuple[str, ...]) -> int | None:
        name = next((name for name in names if name in environ), None)
        if name is None:
            return None
        if not environ[name].isdigit():
            raise SetupError(
                f"{name}={environ[name]!r}, which {launcher.name} sets, is not a number: let the"
                " launcher itself set its variables"
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
        if launcher.count_local is None
        else launcher.count_local(environ),
        depth=number(launcher.depth),
        node=next((environ[name] for name in launcher.node if name in environ), platform.node()),
        seen=", ".join(f"{name}={environ[name]}" for name in (launcher.rank[0], *sizes[:1])),
    )


def module_command(module: str, python: str = sys.executable) -> list[str]:
    """Returns the command with which an interpreter executes a module of this package.

    Unlike ``python -m``, it imports nothing from the working directory, which may hold anything.
    """
    has_option = sys.version_info >= (3, 11)
    if has_option and python == sys.executable:  # another one may be older
        return [python, "-P", "-m", module]
    program = (
        "import sys; del sys.path[0]; import runpy;"
        " runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    return [python, "-c", program, module]


def without_terminal(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a job on this machine whose output is a file, for programs."""
    return {
        name: value
        for name, value in without_allocation(environ, here=True).items()
        if name not in (TERMINAL_VARIABLE, WIDTH_VARIABLE)
    }


def terminal() -> str | None:
    """Returns the device of the terminal that shows this process's output; None if none does."""
    if launcher_variable() is None and os.isatty(1):
        return os.ttyname(1)
    return os.environ.get(TERMINAL_VARIABLE)
