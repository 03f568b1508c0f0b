"""What is wrong with the nodes of a job, judged from the facts of all its ranks.

A check takes the facts and what the job needs, and gives findings as the doctor does; a fatal one
names the nodes. Nodes are compared with what most have.
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
"""Nodes that a message names."""
STEPPED_S = 1.0
"""A wall clock that gains or loses this much on the monotonic one has been set meanwhile."""
PACKAGES_OF_ONE_RANK = ("candle-p1", "keras", "tensorflow")

INSTALL = "install candle-p1[cpu] or candle-p1[gpu], or start the Python that has it, by its path"
SAME_EVERYWHERE = (
    "start the ranks with the Python of one environment, by its full path, on a file system that"
    " all nodes share, or copy the environment to every node anew"
)
UNUSABLE = {
    "horovod": REINSTALL_HOROVOD,
    "mpi4py": "load the MPI module it is to be used with, in the job as well",
}
ONE_MPI = (
    "set MPI4PY_LIBMPI to the library that belongs to the launcher, and build Horovod with its"
    " mpicxx on PATH: make setup MPI=system"
)
LOOK_AT_GPUS = (
    "look at nvidia-smi and CUDA_VISIBLE_DEVICES there, ask the scheduler for the GPUs, leave the"
    " node out, or say how many GPUs a node needs: --gpus"
)
GPU_EACH = (
    "have the launcher give each rank a GPU of its own (jsrun -g1, srun --gpus-per-task=1), or let"
    " all ranks of a node see all its GPUs"
)
MORE_ROOM = {
    SHARED_MEMORY: "free it or enlarge it (docker run --shm-size=8g, mount -o remount,size=8g), or"
    " say what the job needs: --shm-gib, 0 where TMPDIR has the room instead",
    "results": "name a directory that has room and can be written: --output",
    "data": "set CANDLE_DATA_DIR to a directory that has room and can be written",
}


@dataclass(frozen=True)
class Needs:
    """What a job needs of every node.

    Attributes:
        output: Where results go.
        data: Where data sets and caches are kept.
        files: That every node has to see.
        num_gpus: Of a node; None is what most nodes have.
        shared_memory_bytes: Free in /dev/shm.
        memory_bytes: Free.
        disk_bytes: Free for results, and for data.
        clock_s: How far the nodes' clocks may be apart.
    """

    output: Path = Path("output")
    data: Path = field(default_factory=data_directory)
    files: tuple[Path, ...] = ()
    num_gpus: int | None = None
    shared_memory_bytes: float = GIB
    memory_bytes: float = NEEDED_MEMORY_BYTES
    disk_bytes: float = NEEDED_DISK_BYTES
    clock_s: float = 5.0


def judge(facts: Sequence[NodeFacts], needs: Needs) -> list[Finding]:
    """Returns what each check finds in the facts of all ranks, which are in the order of ranks."""
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
            yield _fault(name, same.value, unusable, f"it cannot be used: {why}", fix)
        else:
            yield same


def _mpi(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    if len(facts) == 1 or any({"mpi4py", "horovod"} & one.unusable.keys() for one in facts):
        return  # not needed; told by the packages
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
        return  # told by the packages
    nodes = _by_node(usable)
    counts = {node: _gpus_of_node(ranks) for node, ranks in nodes.items()}
    wanted = _most_common(counts.values()) if needs.num_gpus is None else needs.num_gpus
    value = _range(counts.values(), "{:.0f} per node") if any(counts.values()) else "none"
    fewer = [one for one in usable if counts[one.node] < wanted]
    crowded = [one for one in usable if 1 < (one.num_gpus or 0) < one.local_size]
    sharing = [one for one in usable if _share_one(nodes[one.node])]
    blind = [one for one in usable if one.num_gpus == 0 and one.has_driver]
    if fewer and not sharing:
        what = f"{counts[fewer[0].node]} GPUs are visible, and {wanted} are needed"
        yield _fault("GPUs", value, fewer, what, LOOK_AT_GPUS)
    elif crowded:
        what = f"{crowded[0].local_size} ranks have {crowded[0].num_gpus} GPUs"
        yield _fault("GPUs", value, crowded, what, "start at most one rank per GPU")
    elif sharing:
        yield _fault("GPUs", value, sharing, "all ranks see the same single GPU", GPU_EACH)
    elif blind:
        what = "an NVIDIA driver is installed but TensorFlow sees no GPU"
        fix = "install candle-p1[gpu] (make setup GPU=1); ask the scheduler for GPUs"
        yield _fault("GPUs", value, blind, what, fix, fatal=False)
    else:
        yield Finding("GPUs", value)


def _rooms(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    for name in facts[0].rooms:
        rooms = {one.rank: one.rooms[name] for one in facts}
        needed = needs.shared_memory_bytes if name == SHARED_MEMORY else needs.disk_bytes
        free = _range([room.free_bytes / GIB for room in rooms.values()], "{:.1f} GiB free")
        value = free + ("" if name == SHARED_MEMORY else f" in {rooms[facts[0].rank].path}")
        closed = [one for one in facts if rooms[one.rank].problem]
        small = [one for one in facts if rooms[one.rank].free_bytes < needed]
        if closed:
            yield _fault(name, value, closed, str(rooms[closed[0].rank].problem), MORE_ROOM[name])
        elif small:
            least = min((rooms[one.rank] for one in small), key=lambda room: room.free_bytes)
            what = f"{least.path} has {least.free_bytes / GIB:.1f} GiB free of {needed / GIB:.1f}"
            yield _fault(name, value, small, what + " that are needed", MORE_ROOM[name])
        else:
            yield Finding(name, value)


def _memory(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    value = _range([one.memory_bytes / GIB for one in facts], "{:.1f} GiB free")
    small = [one for one in facts if one.memory_bytes < needs.memory_bytes]
    if small:
        least = min(one.memory_bytes for one in small) / GIB
        what = f"{least:.1f} GiB are free of {needs.memory_bytes / GIB:.1f} that are needed"
        fix = "leave the node out, ask for more, or say what the job needs: --memory-gib"
        yield _fault("memory", value, small, what, fix)
    else:
        yield Finding("memory", value)


def _files(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    for path in dict.fromkeys(path for one in facts for path in one.files):
        sizes = {one.rank: one.files[path] for one in facts if path in one.files}
        absent = [one for one in facts if path in one.files and one.files[path] is None]
        name = f"file {Path(path).name}"
        if absent:
            fix = "put it on a file system that all nodes share, or stage it to every node"
            yield _fault(name, "missing", absent, f"{path} is not there or not readable", fix)
            continue
        common = _most_common(sizes.values())
        odd = [one for one in facts if sizes.get(one.rank, common) != common]
        if odd:
            what = f"{path} has {sizes[odd[0].rank]} bytes, where the others have {common}"
            yield _fault(name, "different", odd, what, "stage it to every node anew")
        else:
            yield Finding(name, f"{common} bytes")


def _clock(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    times = sorted(one.wall_s for one in facts)
    middle = times[len(times) // 2]
    value = f"within {times[-1] - times[0]:.3f} s"
    wrong = [one for one in facts if abs(one.wall_s - middle) > needs.clock_s]
    stepped = [one for one in facts if abs(one.step_s) > STEPPED_S]
    fix = "tell the machine's operators (NTP), or leave the node out"
    if wrong:
        what = f"the clock is {wrong[0].wall_s - middle:+.1f} s from the others'"
        yield _fault("clocks", value, wrong, what, fix)
    elif stepped:
        what = f"the clock was set by {stepped[0].step_s:+.1f} s during the preflight"
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
    _rooms,
    _memory,
    _files,
    _clock,
)


def _fault(
    name: str, value: str, on: Sequence[NodeFacts], what: str, fix: str, fatal: bool = True
) -> Finding:
    """Returns a finding that names the nodes a problem is on."""
    return Finding(name, value, f"{_names(one.node for one in on)}: {name}: {what}", fix, fatal)


def _same(name: str, values: Mapping[int, str], facts: Sequence[NodeFacts]) -> Finding:
    """Returns a finding that is fatal where ranks differ; what most have is the right one."""
    common = _most_common(values.values())
    odd = [one for one in facts if values[one.rank] != common]
    if not odd:
        return Finding(name, common)
    theirs = ", ".join(dict.fromkeys(values[one.rank] for one in odd))
    return _fault(name, common, odd, f"{theirs}, where the others have {common}", SAME_EVERYWHERE)


def _by_node(facts: Sequence[NodeFacts]) -> dict[str, list[NodeFacts]]:
    nodes: dict[str, list[NodeFacts]] = {}
    for one in facts:
        nodes.setdefault(one.node, []).append(one)
    return nodes


def _gpus_of_node(ranks: Sequence[NodeFacts]) -> int:
    """Returns the GPUs that a node's ranks see: each once, where they can be told apart."""
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
