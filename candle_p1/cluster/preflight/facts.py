"""Facts about a node before a job: software, GPUs, memory, disk space, files.

Nothing is checked here, and nothing raises: that something is missing is a fact, too. The checks
compare the facts of all ranks.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from candle_p1.distributed import installation, shared_file
from candle_p1.distributed.backend import choose_backend, engine_of
from candle_p1.distributed.gpus import Lack, why_none
from candle_p1.distributed.mpi_library import MpiLibrary, mpi_in_use
from candle_p1.files import expand_user
from candle_p1.instrument.power import gpus
from candle_p1.instrument.power.source import SensorError
from candle_p1.records import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BACKEND = "backend"
PACKAGES = ("Python", "candle-p1", "keras", BACKEND, "horovod", "mpi4py")
"""What a job needs; BACKEND stands for the package that Keras computes with. Horovod is needed with
TensorFlow only."""
SHARED_MEMORY = "shared memory"
MEMORY = "memory"

MPI_LIBRARY = re.compile(
    r"/lib(mpi|mpich|mpi_(ibm|cray|crayclang|gnu|intel|nvidia|amd|aocc)[\w]*)(-\w+)?\.so"
)
"""An MPI library (Open MPI, MPICH, Intel MPI, Spectrum MPI, or Cray MPICH, which has one for each
compiler), but not the libraries that come with it (libmpi_cxx, libmpi_mpifh, libmpi_gtl_cuda)."""


@dataclass(frozen=True)
class FreeSpace:
    """The free memory, or the space in a directory that a job writes to, and creates if necessary.

    Attributes:
        path: The directory, as it was given; "" for memory.
        free_bytes: Free bytes, of the file system on which the directory is or will be.
        problem: Why it cannot be written; None if it can.
    """

    path: str
    free_bytes: int
    problem: str | None = None


@dataclass(frozen=True)
class NodeFacts:
    """What one rank found on its node.

    Attributes:
        rank: The rank.
        node: The name of its node.
        local_rank: The rank within the node.
        local_size: The number of ranks on the node.
        backend: What Keras computes with: "tensorflow" or "jax".
        packages: The versions of those PACKAGES that are installed.
        unusable: What could not be imported or used, and why.
        mpi_library: Name and version of the MPI library; None if there is none.
        mpi: The MPI library that this rank has initialized; None if it has none.
        mpi_files: The MPI libraries that this process has loaded.
        horovod: What Horovod was built with; empty if it cannot be used, or is not needed.
        num_gpus: The number of GPUs that the backend sees; None if it cannot be used.
        gpu_lack: Why it sees none; None if it does.
        gpu_ids: The UUIDs of the visible GPUs; None if they cannot be told apart.
        has_driver: Whether an NVIDIA driver is installed.
        space: The memory, and the directories that a job writes to, by purpose.
        files: Sizes of the data files, by path; None for those that cannot be read.
        wall_s: The wall clock when all ranks read theirs, in seconds since 1970.
        step_s: By how much the wall clock gained on the monotonic one during the examination.
    """

    rank: int
    node: str
    local_rank: int
    local_size: int
    backend: str = "tensorflow"
    packages: dict[str, str] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    mpi_library: str | None = None
    mpi: MpiLibrary | None = None
    mpi_files: list[str] = field(default_factory=list)
    horovod: dict[str, bool] = field(default_factory=dict)
    num_gpus: int | None = None
    gpu_lack: Lack | None = None
    gpu_ids: list[str] | None = None
    has_driver: bool = False
    space: dict[str, FreeSpace] = field(default_factory=dict)
    files: dict[str, int | None] = field(default_factory=dict)
    wall_s: float = 0.0
    step_s: float = 0.0


def find_software(*, with_mpi: bool) -> dict[str, Any]:
    """Returns what is installed and usable, as fields of `NodeFacts`; takes seconds.

    Args:
        with_mpi: Whether MPI, and with TensorFlow Horovod, are needed, because there are several
            ranks.
    """
    unusable: dict[str, str] = {}

    def probe(name: str, find: Callable[[], Any]) -> Any:
        try:
            return find()
        except Exception as error:  # any error is a fact
            unusable[name] = f"{error or type(error).__name__}".splitlines()[0]
            return None

    versions = environment.package_versions()
    if "tensorflow-cpu" in versions:
        versions["tensorflow"] = versions["tensorflow-cpu"]
    versions["Python"] = platform.python_version()
    backend = probe("keras", choose_backend) or "tensorflow"
    with_horovod = with_mpi and engine_of(backend) == "horovod"
    names = probe(backend, partial(installation.visible_gpus, backend))
    if "keras" not in unusable:
        probe("keras", lambda: importlib.import_module("keras"))
    return {
        "backend": backend,
        "packages": {name: versions[name] for name in (backend, *PACKAGES) if name in versions},
        "mpi_library": probe("mpi4py", installation.mpi_library) if with_mpi else None,
        "mpi": mpi_in_use() if with_mpi else None,
        "horovod": (probe("horovod", installation.horovod_build) or {}) if with_horovod else {},
        "mpi_files": loaded_mpi_libraries(),
        "num_gpus": None if names is None else len(names),
        "gpu_lack": why_none(backend) if names == [] else None,
        "gpu_ids": visible_gpu_ids(),
        "has_driver": shutil.which("nvidia-smi") is not None,
        "unusable": unusable,
    }


def loaded_mpi_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Returns the MPI libraries that this process has loaded, with symbolic links resolved."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if MPI_LIBRARY.search(line)}
    return sorted(str(Path(path).resolve()) for path in paths)


def visible_gpu_ids() -> list[str] | None:
    """Returns the UUIDs of the NVIDIA GPUs that this rank sees; None if NVML does not know them."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or no GPU
        return None
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        ids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        chosen = os.environ.get(gpus.CUDA)
        return ids if chosen is None else [ids[place] for place in gpus.select(chosen, ids)]
    except (pynvml.NVMLError, SensorError):  # a GPU of another job; a MIG instance
        return None
    finally:
        pynvml.nvmlShutdown()


def find_space(directories: dict[str, Path]) -> dict[str, FreeSpace]:
    """Returns the available memory, and the disk space in directories, by purpose.

    Args:
        directories: The directories that the job writes to, by purpose.
    """
    space = {SHARED_MEMORY: free_space(shared_file.MEMORY)}
    space |= {name: free_space(path) for name, path in directories.items()}
    available = psutil.virtual_memory().available
    return space | {MEMORY: FreeSpace("", min(available, environment.memory_limit_bytes()))}


def free_space(path: Path) -> FreeSpace:
    """Returns the free space in a directory, or in its nearest parent that exists."""
    absolute = expand_user(path).absolute()
    try:
        existing = next(one for one in (absolute, *absolute.parents) if one.exists())
        free_bytes = shutil.disk_usage(existing).free
    except OSError as error:  # a file system is down, or a directory cannot be searched
        return FreeSpace(str(path), 0, f"{error.filename or absolute}: {error.strerror}")
    if not existing.is_dir():
        return FreeSpace(str(path), 0, f"{existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        return FreeSpace(str(path), free_bytes, f"{existing} cannot be written to")
    return FreeSpace(str(path), free_bytes)


def find_files(paths: Iterable[Path]) -> dict[str, int | None]:
    """Returns the sizes of files, by path; None for those that do not exist or cannot be read."""

    def size(path: Path) -> int | None:
        try:
            return path.stat().st_size if path.is_file() and os.access(path, os.R_OK) else None
        except OSError:
            return None

    return {str(path): size(expand_user(path)) for path in paths}
