"""Checks of a job's nodes, based on the facts of all its ranks.

A check takes the facts and what the job needs, and yields findings as the doctor does. Problems
name their nodes. What most nodes have is taken to be right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mode

from candle_p1.cluster.doctor import (
    NEEDED_DISK_BYTES,
    NEEDED_MEMORY_BYTES,
    REINSTALL_HOROVOD,
    Finding,
)
from candle_p1.cluster.preflight.facts import (
    BACKEND,
    MEMORY,
    PACKAGES,
    SHARED_MEMORY,
    NodeFacts,
)
from candle_p1.data.directory import data_directory
from candle_p1.distributed.backend import ENGINES, engine_of
from candle_p1.distributed.gpus import BACKENDS, USE_CPUS
from candle_p1.text import count, name_nodes

GIB = 2**30
STEPPED_S = 1.0
"""A wall clock that gains or loses more than this on the monotonic one has been set in between."""
FOR_SEVERAL_RANKS = ("horovod", "mpi4py")

BY_PATH = "or start the Python that has it by its path"
INSTALL = f"install candle-p1[{{}}] or candle-p1[{{}}], {BY_PATH}"
SAME_EVERYWHERE = (
    "start the ranks with the full path of one Python environment on a file system that all nodes"
    " share, or copy the environment to every node again"
)
UNUSABLE = {
    "horovod": REINSTALL_HOROVOD,
    "mpi4py": "load the MPI module that it should use, also in the job",
}
ONE_MPI = "set MPI4PY_LIBMPI to the library that belongs to the launcher"
ONE_MPI_FOR_HOROVOD = f"{ONE_MPI}, and build Horovod with its mpicxx on PATH: make setup MPI=system"
INSTALL_FOR_GPUS = "install candle-p1[{}] ({} GPU=1); request GPUs from the scheduler"
MORE_GPUS = (
    "check nvidia-smi and CUDA_VISIBLE_DEVICES there, request the GPUs from the scheduler, exclude"
    " the node, or state how many GPUs a node needs: --gpus"
)
GPU_EACH = (
    "let the launcher give each rank its own GPU (jsrun -g1, srun --gpus-per-task=1), or let all"
    " ranks of a node see all its GPUs"
)
MORE_SPACE = {
    SHARED_MEMORY: "free or enlarge it (docker run --shm-size=8g, mount -o remount,size=8g), or"
    " state what the job needs: --shm-gib, which is 0 if TMPDIR has the space instead",
    "results": "choose a writable directory with enough space: --output",
    "data": "set CANDLE_DATA_DIR to a writable directory with enough space",
    MEMORY: "exclude the node, request more memory, or state what the job needs: --memory-gib",
}


@dataclass(frozen=True)
class Needs:
    """What a job needs on every node.

    Attributes:
        output: The directory for results.
        data: The directory for data sets and caches.
        files: Data files that every node has to see.
        num_gpus: GPUs of a node; None is what most nodes have.
        gpus_origin: What says so: a flag or a variable.
        shm_gib: Free space in /dev/shm.
        memory_gib: Available memory.
        disk_gib: Free disk space, for results and for data each.
        clock_s: The largest difference between a node's clock and the median, in s.
    """

    output: Path = Path("output")
    data: Path = field(default_factory=data_directory)
    files: tuple[Path, ...] = ()
    num_gpus: int | None = None
    gpus_origin: str = "--gpus"
    shm_gib: float = 1.0
    memory_gib: float = NEEDED_MEMORY_BYTES / GIB
    disk_gib: float = NEEDED_DISK_BYTES / GIB
    clock_s: float = 5.0


def check_facts(facts: Sequence[NodeFacts], needs: Needs) -> list[Finding]:
    """Returns the findings of all checks, given the facts of all ranks in order."""
    checks = (_ranks, _packages, _mpi, _gpus, _space, _files, _clock)
    return [finding for check in checks for finding in check(facts, needs)]


def _ranks(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    nodes = {one.node for one in facts}
    yield Finding("ranks", f"{len(facts)} on {count(len(nodes), 'node')}")


def _packages(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    backend = facts[0].backend
    engine = engine_of(backend)
    needed = [name for name in PACKAGES if len(facts) > 1 or name not in FOR_SEVERAL_RANKS]
    if len(facts) > 1:
        engines = {one.rank: engine_of(one.backend) for one in facts}
        yield _same("engine", engines, facts)
        needed = [name for name in needed if name != "horovod" or engine == "horovod"]
    for name in (backend if name == BACKEND else name for name in needed):
        versions = {one.rank: one.packages.get(name, "none") for one in facts}
        same = _same(name, versions, facts)
        unusable = [one for one in facts if name in one.unusable]
        if set(versions.values()) == {"none"}:
            yield _fault(
                name, "none", facts, "it is not installed", INSTALL.format(*ENGINES[engine].extras)
            )
        elif unusable and not same.fatal:
            why = unusable[0].unusable[name]
            fix = UNUSABLE.get(name, SAME_EVERYWHERE)
            yield _fault(name, same.value, unusable, f"cannot be used: {why}", fix)
        else:
            yield same


def _mpi(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    if len(facts) == 1 or any({"mpi4py", "horovod"} & one.unusable.keys() for one in facts):
        return  # not needed, or reported by the packages
    library = facts[0].mpi_library or "none"
    engine = engine_of(facts[0].backend)
    with_horovod = [one for one in facts if engine_of(one.backend) == "horovod"]
    without = [one for one in with_horovod if not one.horovod.get("mpi")]
    several = [one for one in facts if len(one.mpi_files) > 1]
    limited = [one for one in with_horovod if one.mpi and one.mpi.problem]
    if without:
        yield _fault("MPI", library, without, "Horovod was built without MPI", REINSTALL_HOROVOD)
    elif several:
        paths = " and ".join(several[0].mpi_files)
        users = "mpi4py and Horovod use" if engine == "horovod" else "this process has loaded"
        what = f"{users} different MPI libraries, {paths}"
        fix = ONE_MPI_FOR_HOROVOD if engine == "horovod" else ONE_MPI
        yield _fault("MPI", library, several, what, fix)
    elif limited and limited[0].mpi and limited[0].mpi.problem:
        yield _fault("MPI", library, limited, *limited[0].mpi.problem)
    else:
        yield _same("MPI", {one.rank: one.mpi_library or "none" for one in facts}, facts)


def _gpus(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    usable = [one for one in facts if one.num_gpus is not None]
    if not usable:
        return  # reported by the packages
    nodes: dict[str, list[NodeFacts]] = defaultdict(list)
    for one in usable:
        nodes[one.node].append(one)
    counts = {node: _gpus_of_node(ranks) for node, ranks in nodes.items()}
    wanted = mode(counts.values()) if needs.num_gpus is None else needs.num_gpus
    value = _range(counts.values(), "{:.0f} per node") if any(counts.values()) else "none"
    fewer = [one for one in usable if counts[one.node] < wanted]
    crowded = [one for one in usable if 1 < (one.num_gpus or 0) < one.local_size]
    sharing = [one for one in usable if _share_one(nodes[one.node])]
    blind = [one for one in usable if one.num_gpus == 0 and one.has_driver]
    if fewer and not sharing:
        what = f"{count(wanted, 'GPU')} needed"
        what += "" if needs.num_gpus is None else f" ({needs.gpus_origin})"
        lack = fewer[0].gpu_lack
        if lack is None:
            what += f", but only {counts[fewer[0].node]} visible"
        else:
            what += f", but none is visible: {lack.why}"
        yield _fault("GPUs", value, fewer, what, f"{lack.fix}; {USE_CPUS}" if lack else MORE_GPUS)
    elif crowded:
        what = f"{crowded[0].local_size} ranks share {crowded[0].num_gpus} GPUs"
        yield _fault("GPUs", value, crowded, what, "start at most one rank per GPU")
    elif sharing:
        yield _fault("GPUs", value, sharing, "all ranks see the same single GPU", GPU_EACH)
    elif blind:
        what = f"an NVIDIA driver is installed but {BACKENDS[blind[0].backend]} sees no GPU"
        kind = ENGINES[engine_of(blind[0].backend)]
        fix = INSTALL_FOR_GPUS.format(kind.extras[1], kind.set_up)
        yield _fault("GPUs", value, blind, what, fix, fatal=False)
    else:
        yield Finding("GPUs", value)


def _space(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    needed_gib = {SHARED_MEMORY: needs.shm_gib, MEMORY: needs.memory_gib}
    for name in facts[0].space:
        space = {one.rank: one.space[name] for one in facts}
        needed = needed_gib.get(name, needs.disk_gib)
        least = min(space.values(), key=lambda found: found.free_bytes)
        place = f" in {least.path}" if least.path else ""
        free = _range([one.free_bytes / GIB for one in space.values()], "{:.1f} GiB free")
        value = free + place
        closed = [one for one in facts if space[one.rank].problem]
        small = [one for one in facts if space[one.rank].free_bytes < needed * GIB]
        if closed:
            yield _fault(name, value, closed, str(space[closed[0].rank].problem), MORE_SPACE[name])
        elif small:
            what = f"{least.free_bytes / GIB:.1f} GiB free{place}, but {needed:.1f} GiB needed"
            yield _fault(name, value, small, what, MORE_SPACE[name])
        else:
            yield Finding(name, value)


def _files(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    for path in facts[0].files:
        name = f"file {Path(path).name}"
        common = mode(one.files[path] for one in facts)
        absent = [one for one in facts if one.files[path] is None]
        odd = [one for one in facts if one.files[path] != common]
        if absent:
            fix = "put it on a file system that all nodes share, or copy it to every node"
            yield _fault(name, "missing", absent, f"{path} does not exist or is not readable", fix)
        elif odd:
            what = f"{path} has {odd[0].files[path]} bytes, but {common} on the other nodes"
            yield _fault(name, "different", odd, what, "copy it to every node again")
        else:
            yield Finding(name, f"{common} bytes")


def _clock(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    times = sorted(one.wall_s for one in facts)
    middle = times[len(times) // 2]
    value = f"within {times[-1] - times[0]:.3f} s"
    wrong = [one for one in facts if abs(one.wall_s - middle) > needs.clock_s]
    stepped = [one for one in facts if abs(one.step_s) > STEPPED_S]
    fix = "ask the machine's administrators (NTP), or exclude the node"
    if wrong:
        what = f"the clock is off by {wrong[0].wall_s - middle:+.1f} s"
        yield _fault("clocks", value, wrong, what, fix)
    elif stepped:
        what = f"the clock was changed by {stepped[0].step_s:+.1f} s during the preflight"
        yield _fault("clocks", value, stepped, what, fix)
    else:
        yield Finding("clocks", value)


def _fault(
    name: str, value: str, on: Sequence[NodeFacts], what: str, fix: str, fatal: bool = True
) -> Finding:
    """Returns a finding with a problem on some nodes, which it names."""
    return Finding(name, value, f"{name_nodes(one.node for one in on)}: {name}: {what}", fix, fatal)


def _same(name: str, values: Mapping[int, str], facts: Sequence[NodeFacts]) -> Finding:
    """Returns a finding that is fatal if ranks differ."""
    common = mode(values.values())
    odd = [one for one in facts if values[one.rank] != common]
    if not odd:
        return Finding(name, common)
    theirs = ", ".join(dict.fromkeys(values[one.rank] for one in odd))
    return _fault(name, common, odd, f"{theirs}, but {common} elsewhere", SAME_EVERYWHERE)


def _gpus_of_node(ranks: Sequence[NodeFacts]) -> int:
    """Returns the number of GPUs that a node's ranks see."""
    ids = _gpu_ids(ranks)
    if ids:
        return len(ids)
    counts = [one.num_gpus or 0 for one in ranks]
    return sum(counts) if max(counts) == 1 else min(counts)


def _share_one(ranks: Sequence[NodeFacts]) -> bool:
    return len(ranks) > 1 and all(one.num_gpus == 1 for one in ranks) and len(_gpu_ids(ranks)) == 1


def _gpu_ids(ranks: Sequence[NodeFacts]) -> set[str]:
    """Returns the GPUs that a node's ranks see; none if one rank cannot tell them apart."""
    if any(one.gpu_ids is None for one in ranks):
        return set()
    return {name for one in ranks if one.num_gpus for name in one.gpu_ids or ()}


def _range(values: Iterable[float], form: str) -> str:
    texts = list(dict.fromkeys(form.format(value) for value in sorted(values)))
    if len(texts) == 1:
        return texts[0]
    return f"{texts[0].split()[0]} to {texts[-1]}"
