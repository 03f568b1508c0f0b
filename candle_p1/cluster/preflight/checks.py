"""Checks of a job's nodes, based on the facts of all its ranks.

A check takes the facts and what the job needs, and yields findings as the doctor does. Problems
name their nodes. What most nodes have is taken to be right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from candle_p1.cluster.doctor import (
    NEEDED_DISK_BYTES,
    NEEDED_MEMORY_BYTES,
    REINSTALL_HOROVOD,
    Finding,
)
from candle_p1.cluster.preflight.facts import PACKAGES, SHARED_MEMORY, NodeFacts
from candle_p1.data.directory import data_directory
from candle_p1.text import count

T = TypeVar("T")
GIB = 2**30
MANY = 8
"""The most nodes that a message names."""
STEPPED_S = 1.0
"""A wall clock that gains or loses more than this on the monotonic one has been set meanwhile."""
PACKAGES_OF_ONE_RANK = ("candle-p1", "keras", "tensorflow")

INSTALL = "install candle-p1[cpu] or candle-p1[gpu], or start the Python that has it by its path"
SAME_EVERYWHERE = (
    "start the ranks with the full path of one Python environment on a file system that all nodes"
    " share, or copy the environment to every node again"
)
UNUSABLE = {
    "horovod": REINSTALL_HOROVOD,
    "mpi4py": "load the MPI module that it should use, also in the job",
}
ONE_MPI = (
    "set MPI4PY_LIBMPI to the library that belongs to the launcher, and build Horovod with its"
    " mpicxx on PATH: make setup MPI=system"
)
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
}


@dataclass(frozen=True)
class Needs:
    """What a job needs on every node.

    Attributes:
        output: The directory for results.
        data: The directory for data sets and caches.
        files: Data files that every node has to see.
        num_gpus: GPUs of a node; None is what most nodes have.
        shared_memory_bytes: Free space in /dev/shm.
        memory_bytes: Available memory.
        disk_bytes: Free disk space, for results and for data each.
        clock_s: The largest difference between a node's clock and the median, in s.
    """

    output: Path = Path("output")
    data: Path = field(default_factory=data_directory)
    files: tuple[Path, ...] = ()
    num_gpus: int | None = None
    shared_memory_bytes: float = GIB
    memory_bytes: float = NEEDED_MEMORY_BYTES
    disk_bytes: float = NEEDED_DISK_BYTES
    clock_s: float = 5.0


def check_facts(facts: Sequence[NodeFacts], needs: Needs) -> list[Finding]:
    """Returns the findings of all checks, given the facts of all ranks in order."""
    return [finding for check in CHECKS for finding in check(facts, needs)]


def _ranks(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    nodes = {one.node for one in facts}
    yield Finding("ranks", f"{len(facts)} on {count(len(nodes), 'node')}")


def _python(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    yield _same("Python", {one.rank: one.python for one in facts}, facts)


def _packages(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    for name in PACKAGES if len(facts) > 1 else PACKAGES_OF_ONE_RANK:
        versions = {one.rank: one.packages.get(name, "none") for one in facts}
        same = _same(name, versions, facts)
        unusable = [one for one in facts if name in one.unusable]
        if set(versions.values()) == {"none"}:
            yield _fault(name, "none", facts, "it is not installed", INSTALL)
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
    without = [one for one in facts if not one.horovod.get("mpi")]
    several = [one for one in facts if len(one.mpi_files) > 1]
    if without:
        yield _fault("MPI", library, without, "Horovod was built without MPI", REINSTALL_HOROVOD)
    elif several:
        paths = " and ".join(several[0].mpi_files)
        what = f"mpi4py and Horovod use different MPI libraries, {paths}"
        yield _fault("MPI", library, several, what, ONE_MPI)
    else:
        yield _same("MPI", {one.rank: one.mpi_library or "none" for one in facts}, facts)


def _gpus(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    usable = [one for one in facts if one.num_gpus is not None]
    if not usable:
        return  # reported by the packages
    nodes = _by_node(usable)
    counts = {node: _gpus_of_node(ranks) for node, ranks in nodes.items()}
    wanted = _most_common(counts.values()) if needs.num_gpus is None else needs.num_gpus
    value = _range(counts.values(), "{:.0f} per node") if any(counts.values()) else "none"
    fewer = [one for one in usable if counts[one.node] < wanted]
    crowded = [one for one in usable if 1 < (one.num_gpus or 0) < one.local_size]
    sharing = [one for one in usable if _share_one(nodes[one.node])]
    blind = [one for one in usable if one.num_gpus == 0 and one.has_driver]
    if fewer and not sharing:
        what = f"{wanted} GPUs are needed, but only {counts[fewer[0].node]} visible"
        yield _fault("GPUs", value, fewer, what, MORE_GPUS)
    elif crowded:
        what = f"{crowded[0].local_size} ranks share {crowded[0].num_gpus} GPUs"
        yield _fault("GPUs", value, crowded, what, "start at most one rank per GPU")
    elif sharing:
        yield _fault("GPUs", value, sharing, "all ranks see the same single GPU", GPU_EACH)
    elif blind:
        what = "an NVIDIA driver is installed but TensorFlow sees no GPU"
        fix = "install candle-p1[gpu] (make setup GPU=1); request GPUs from the scheduler"
        yield _fault("GPUs", value, blind, what, fix, fatal=False)
    else:
        yield Finding("GPUs", value)


def _space(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    for name in facts[0].space:
        space = {one.rank: one.space[name] for one in facts}
        needed = needs.shared_memory_bytes if name == SHARED_MEMORY else needs.disk_bytes
        free = _range([one.free_bytes / GIB for one in space.values()], "{:.1f} GiB free")
        value = free + ("" if name == SHARED_MEMORY else f" in {space[facts[0].rank].path}")
        closed = [one for one in facts if space[one.rank].problem]
        small = [one for one in facts if space[one.rank].free_bytes < needed]
        if closed:
            yield _fault(name, value, closed, str(space[closed[0].rank].problem), MORE_SPACE[name])
        elif small:
            least = min((space[one.rank] for one in small), key=lambda found: found.free_bytes)
            free = f"{least.free_bytes / GIB:.1f} GiB free in {least.path}"
            what = f"{free}, but {needed / GIB:.1f} GiB needed"
            yield _fault(name, value, small, what, MORE_SPACE[name])
        else:
            yield Finding(name, value)


def _memory(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    value = _range([one.memory_bytes / GIB for one in facts], "{:.1f} GiB free")
    small = [one for one in facts if one.memory_bytes < needs.memory_bytes]
    if small:
        least = min(one.memory_bytes for one in small) / GIB
        what = f"{least:.1f} GiB free, but {needs.memory_bytes / GIB:.1f} GiB needed"
        fix = "exclude the node, request more memory, or state what the job needs: --memory-gib"
        yield _fault("memory", value, small, what, fix)
    else:
        yield Finding("memory", value)


def _files(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    for path in dict.fromkeys(path for one in facts for path in one.files):
        sizes = {one.rank: one.files[path] for one in facts if path in one.files}
        absent = [one for one in facts if path in one.files and one.files[path] is None]
        name = f"file {Path(path).name}"
        if absent:
            fix = "put it on a file system that all nodes share, or copy it to every node"
            yield _fault(name, "missing", absent, f"{path} does not exist or is not readable", fix)
            continue
        common = _most_common(sizes.values())
        odd = [one for one in facts if sizes.get(one.rank, common) != common]
        if odd:
            what = f"{path} has {sizes[odd[0].rank]} bytes, but {common} on the other nodes"
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


Check = Callable[[Sequence[NodeFacts], Needs], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    _ranks,
    _python,
    _packages,
    _mpi,
    _gpus,
    _space,
    _memory,
    _files,
    _clock,
)


def _fault(
    name: str, value: str, on: Sequence[NodeFacts], what: str, fix: str, fatal: bool = True
) -> Finding:
    """Returns a finding with a problem on some nodes, which it names."""
    return Finding(name, value, f"{_names(one.node for one in on)}: {name}: {what}", fix, fatal)


def _same(name: str, values: Mapping[int, str], facts: Sequence[NodeFacts]) -> Finding:
    """Returns a finding that is fatal if ranks differ."""
    common = _most_common(values.values())
    odd = [one for one in facts if values[one.rank] != common]
    if not odd:
        return Finding(name, common)
    theirs = ", ".join(dict.fromkeys(values[one.rank] for one in odd))
    return _fault(name, common, odd, f"{theirs}, but {common} elsewhere", SAME_EVERYWHERE)


def _by_node(facts: Sequence[NodeFacts]) -> dict[str, list[NodeFacts]]:
    nodes: dict[str, list[NodeFacts]] = {}
    for one in facts:
        nodes.setdefault(one.node, []).append(one)
    return nodes


def _gpus_of_node(ranks: Sequence[NodeFacts]) -> int:
    """Returns the number of GPUs that a node's ranks see."""
    if all(one.gpu_ids is not None for one in ranks) and any(one.num_gpus for one in ranks):
        return len({name for one in ranks for name in one.gpu_ids or () if one.num_gpus})
    counts = [one.num_gpus or 0 for one in ranks]
    return sum(counts) if max(counts) == 1 else min(counts)


def _share_one(ranks: Sequence[NodeFacts]) -> bool:
    seen = [one.gpu_ids for one in ranks]
    return (
        len(ranks) > 1
        and all(one.num_gpus == 1 for one in ranks)
        and None not in seen
        and len({name for names in seen for name in names or ()}) == 1
    )


def _most_common(values: Iterable[T]) -> T:
    return Counter(values).most_common(1)[0][0]


def _range(values: Iterable[float], form: str) -> str:
    texts = list(dict.fromkeys(form.format(value) for value in sorted(values)))
    if len(texts) == 1:
        return texts[0]
    return f"{texts[0].split()[0]} to {texts[-1]}"


def _names(nodes: Iterable[str]) -> str:
    """Returns "node a", "nodes a, b" or the first of many."""
    names = list(dict.fromkeys(nodes))
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return f"node{'s' * (len(names) > 1)} {', '.join(names[:MANY])}{more}"
