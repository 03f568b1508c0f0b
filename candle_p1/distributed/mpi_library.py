"""The MPI library of this process: its name, and from which threads it may be called.

Horovod communicates from a thread of its own, beside mpi4py on the main thread. MPI allows that at
one of its four thread levels only, MPI_THREAD_MULTIPLE. A library that was configured otherwise
grants less than it is asked for; then, ranks crash or hang at some time during training.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, NamedTuple

from candle_p1.distributed.comm import Communicator
from candle_p1.distributed.launch_environment import module_command
from candle_p1.errors import SetupError

NEEDED = "multiple"
LEVELS = ("single", "funneled", "serialized", NEEDED)
START_S = 60
"""How long a single process may take to start MPI."""
REQUESTS = ("MPI4PY_RC_THREADS", "MPI4PY_RC_THREAD_LEVEL")
"""Variables by which users ask mpi4py for a lower level."""
FIXES = {
    "CRAY MPICH": "set MPICH_MAX_THREAD_SAFETY=multiple in the job",
    "MVAPICH": "set MV2_ENABLE_AFFINITY=0 in the job",
    "Open MPI": "use an Open MPI that ompi_info calls MPI_THREAD_MULTIPLE: yes",
    "MPICH": "use an MPICH that was configured with --enable-threads=multiple, its default",
}
"""What raises the level, by the beginning of the library's name."""


class MpiLibrary(NamedTuple):
    """Name and version of the MPI library of this process, and which of LEVELS it grants."""

    name: str
    thread_level: str

    @property
    def problem(self) -> tuple[str, str] | None:
        """What is wrong with the level, and what to do about it; None if nothing is."""
        if self.thread_level == NEEDED:
            return None
        what = (
            f"{self.name} grants the thread level MPI_THREAD_{self.thread_level.upper()}, but"
            " Horovod, which communicates from a thread of its own, needs MPI_THREAD_MULTIPLE"
        )
        if requests := [name for name in REQUESTS if name in os.environ]:
            return what, f"unset {' and '.join(requests)}, which may ask for less"
        fixes = [fix for start, fix in FIXES.items() if self.name.startswith(start)]
        return what, [*fixes, "use an MPI library that was built for MPI_THREAD_MULTIPLE"][0]


def describe_version(text: str) -> str:
    """Returns name and version in the text of MPI_Get_library_version."""
    # The configuration follows, after a comma (Open MPI) or in further lines (MPICH).
    first_line = text.split("\x00")[0].splitlines()[0]
    return " ".join(first_line.split(",")[0].split())


def mpi_in_use() -> MpiLibrary | None:
    """Returns the MPI library that this process has initialized; None if there is none."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    codes = {getattr(mpi, f"THREAD_{level.upper()}"): level for level in LEVELS}
    return MpiLibrary(describe_version(mpi.Get_library_version()), codes[mpi.Query_thread()])


def describe_mpi() -> dict[str, Any]:
    """Returns what a record's section "environment" says about MPI; empty without MPI."""
    found = mpi_in_use()
    return {"mpi": {"library": found.name, "thread_level": found.thread_level}} if found else {}


def check_thread_level(comm: Communicator) -> None:
    """Raises SetupError on all ranks if MPI must not be called from several threads; collective."""
    library = mpi_in_use()
    if found := comm.first(library.problem if library and comm.size > 1 else None):
        what, fix = found[1]
        raise SetupError(f"{what}. Fix: {fix}").on_all_ranks()


def library_version() -> str:
    """Returns the name and version of the MPI library that mpi4py loads.

    Raises:
        ImportError: mpi4py is not installed.
        RuntimeError: mpi4py does not find an MPI library.
    """
    import mpi4py

    mpi4py.rc.initialize = False  # asking for the version must not start MPI
    from mpi4py import MPI

    return describe_version(MPI.Get_library_version())


def horovod_build() -> dict[str, bool]:
    """Returns whether Horovod was built with mpi, gloo, nccl, cuda and rocm.

    Raises ImportError if it or TensorFlow is missing, or if it was built without TensorFlow.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow as hvd

    return {
        name: bool(getattr(hvd, f"{name}_built")())
        for name in ("mpi", "gloo", "nccl", "cuda", "rocm")
    }


def start_alone() -> MpiLibrary:
    """Returns the MPI library as a process of its own finds it that starts MPI without a launcher.

    Raises OSError or SubprocessError if it does not start, as on login nodes of some machines.
    """
    started = subprocess.run(
        module_command(__name__), capture_output=True, text=True, timeout=START_S, check=True
    )
    name, level = started.stdout.splitlines()[-2:]
    return MpiLibrary(name, level)


if __name__ == "__main__":
    from mpi4py import MPI  # noqa: F401

    print(*mpi_in_use() or (), sep="\n")
