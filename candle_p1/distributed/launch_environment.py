"""What a launcher leaves in the environment of the processes that it starts."""

from __future__ import annotations

import os

LAUNCHER_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",  # Open MPI, Spectrum MPI under jsrun
    "PMIX_RANK",
    "PMI_RANK",  # MPICH and its kin
    "PMI_SIZE",
    "PALS_RANKID",
    "ALPS_APP_PE",  # aprun
    "JSM_NAMESPACE_SIZE",  # jsrun
    "MPI_LOCALNRANKS",
)
"""Any of these in the environment tells that an MPI launcher started this process."""

TERMINAL_VARIABLE = "CANDLE_P1_TERMINAL"
"""Set by a local launch to the device of the user's terminal: launchers hand on whole lines only,
too late for a bar."""


def launcher_variable() -> str | None:
    """Returns the name of a variable that tells that an MPI launcher started this process."""
    return next((name for name in LAUNCHER_VARIABLES if name in os.environ), None)


def terminal() -> str | None:
    """Returns the device of the terminal that shows this process's output; None if none does."""
    if launcher_variable() is None and os.isatty(1):
        return os.ttyname(1)
    return os.environ.get(TERMINAL_VARIABLE)
