import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from candle_p1.cluster import checks, doctor, preflight
from candle_p1.cluster.checks import GIB, FreeSpace, Needs, NodeFacts
from candle_p1.cluster.preflight import check_facts
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.gpus import Lack
from candle_p1.distributed.launch_environment import LaunchedRank
from candle_p1.distributed.mpi_library import MpiLibrary
from candle_p1.errors import SetupError
from tests.conftest import ROOT
from tests.expected import check_expected

NOTHING = ["--shm_gib", "0", "--memory_gib", "0", "--disk_gib", "0"]
TWO_LIBRARIES = ["/a/libmpich.so", "/b/libmpi.so"]
NEEDS = Needs(output=Path("output"), data=Path("data"))
PACKAGES = {"Python": "3.11.2", "candle-p1": "0.1.0", "keras": "3.15", "tensorflow": "2.18.1"}
PACKAGES |= {"horovod": "0.28.1", "mpi4py": "4.1"}
GOOD = NodeFacts(
    packages=PACKAGES,
    mpi_library="Open MPI v5.0.11",
    mpi_files=["/lib/libmpi.so.40"],
    horovod={"mpi": True, "nccl": True},
    gpus=["H100", "H100"],
    gpu_ids=["GPU-0", "GPU-1"],
    has_driver=True,
    space={
        "shared memory": FreeSpace("/dev/shm", 32 * GIB),
        **{name: FreeSpace(name, 99 * GIB) for name in ("results", "data")},
        "memory": FreeSpace("", 64 * GIB),
    },
    files={"x.csv": 10},
    wall_s=1_000.0,
)


def job(num_nodes=3, ranks_per_node=2, **changes):
    """Returns the facts of a job; changes of the last rank of its second node, "b"."""
    size, facts = ranks_per_node, []
    for rank in range(num_nodes * size):
        place = {"rank": rank, "node": "abc"[rank // size], "local_rank": rank % size}
        facts.append(replace(GOOD, local_size=size, **place))
    facts[2 * size - 1] = replace(facts[2 * size - 1], **changes)
    return facts


def space(name, *found):
    return {"space": {**GOOD.space, name: FreeSpace(*found)}}


def with_gpus(num_gpus, *ids, ranks_per_node=2, **changes):
    """Returns the facts of a job in which the local ranks see the GPUs `ids`."""
    return [
        replace(one, gpus=["H100"] * num_gpus, gpu_ids=ids[one.local_rank], **changes)
        for one in job(ranks_per_node=ranks_per_node)
    ]


JAX = {"Python": "3.11.2", "candle-p1": "0.1.0", "keras": "3.15", "mpi4py": "4.1", "jax": "0.10.2"}
ALONE = {"with_mpi": False, "local_size": 1, "mpi_library": None, "horovod": {}}


def with_jax(**changes):
    """Returns the facts of a job whose environments have neither TensorFlow nor Horovod."""
    ranks = [replace(one, backend="jax", packages=JAX, horovod={}) for one in job()]
    ranks[3] = replace(ranks[3], **changes)
    return ranks


WITHOUT_HOROVOD = {name: PACKAGES[name] for name in PACKAGES if name != "horovod"}
SERIALIZED = MpiLibrary("CRAY MPICH 8", "serialized")
CASES = {
    "nodes that are alike": job(),
    "another Python": job(packages={**PACKAGES, "Python": "3.10.1"}),
    "a node without Horovod": job(packages=WITHOUT_HOROVOD),
    "TensorFlow is unusable": job(unusable={"tensorflow": "libfoo.so: not found"}),
    "Horovod without MPI": job(horovod={"mpi": False}),
    "two MPI libraries": job(mpi_files=TWO_LIBRARIES),
    "one thread may communicate": job(mpi=SERIALIZED),
    "another MPI": job(mpi_library="MPICH 4.2"),
    "little shared memory": job(**space("shared memory", "/dev/shm", GIB // 16)),
    "little space": job(**space("results", "output", GIB)),
    "no space": job(**space("data", "data", 99 * GIB, "/x is full")),
    "little memory": job(**space("memory", "", GIB)),
    "no file": job(files={"x.csv": None}),
    "another file": job(files={"x.csv": 9}),
    "another time": job(wall_s=1_060.0),
    "a clock that is changed": job(step_s=-30.0),
    "a GPU for each rank": with_gpus(1, ["GPU-0"], ["GPU-1"]),  # jsrun -g1
    "GPUs that cannot be told apart": with_gpus(1, None, None),
    "more GPUs than ranks": with_gpus(4, None, None),
    "no GPU": with_gpus(0, [], [], has_driver=False),
    "fewer GPUs on one node": job(gpus=["x"], gpu_ids=["GPU-0"], ranks_per_node=1),
    "GPUs needed: 4": job(),
    "more ranks than GPUs": job(ranks_per_node=3),
    "the same GPU": with_gpus(1, ["GPU-0"], ["GPU-0"]),
    "the same GPU, GPUs needed: 2": with_gpus(1, ["GPU-0"], ["GPU-0"]),
    "a driver, and no GPU": with_gpus(0, [], []),
    "GPUs without NCCL": with_gpus(2, None, None, horovod={"mpi": True, "nccl": False}),
    "JAX": with_jax(),
    "JAX alone": [replace(with_jax()[0], **ALONE)],
    "TensorFlow alone": [replace(GOOD, **ALONE)],
    "JAX, one thread may communicate": with_jax(mpi=SERIALIZED),
    "JAX is too old": with_jax(packages=JAX | {"jax": "0.6"}),
    "JAX, two MPI libraries": with_jax(mpi_files=TWO_LIBRARIES),
    "engines that differ": with_jax(backend="tensorflow", horovod={"mpi": True}),
}


# Of the doctor: what differs from an environment that is complete, and what has faults.
OPEN_MPI, MPICH = "Open MPI v5.0.11", "MPICH Version: 5.0.2"
HYDRA = "HYDRA build details: Version: 5.0.2"
NAMES = ("Python", "candle-p1", "keras", "mpi4py", "horovod", "numpy", "pandas")
VERSIONS = dict.fromkeys(NAMES, "3.1")
USUAL = {
    **{"packages": VERSIONS | {"tensorflow": "2.18"}, "mpi_library": OPEN_MPI, "mpi": None},
    **{"horovod": {"mpi": True}, "gpus": [], "gpu_lack": Lack("there is none", "")},
}
FUNCTIONS = {
    "launcher_variable": lambda: None,
    "start_alone": lambda: MpiLibrary(OPEN_MPI, "multiple"),
    "find_mpirun": lambda: "/bin/mpirun",
    "mpirun_version": lambda path: "mpirun (Open MPI) 5",
}


def broken(*_):
    raise SetupError("no mpirun")


NOT_HERE = {"find_mpirun": broken, "data_directory": broken, "start_alone": lambda: int("no MPI")}
DOCTOR = {
    "the doctor: two GPUs": ({"gpus": ["H100"] * 2, "gpu_lack": None}, {}),
    "the doctor: JAX": (
        {"backend": "jax", "packages": VERSIONS | {"jax": "0.10.2"}, "horovod": {}}, {},
    ),
    "the doctor: MPICH": ({"mpi_library": MPICH}, {"mpirun_version": lambda path: HYDRA}),
    "the doctor: MPICH, and another launcher": ({"mpi_library": MPICH}, {}),
    "the doctor: no framework": ({"packages": VERSIONS}, {}),
    "the doctor: Keras is unusable": ({"unusable": {"keras": "torch is no backend"}}, {}),
    "the doctor: little is there, which is not fatal": ({}, {"list_benchmarks": list}),
    "the doctor: neither MPI nor its launcher start": ({}, NOT_HERE),
}  # fmt: skip


def told(findings, usual=()):
    lines = [
        f"{each.name}: {each.value}"
        + (f"\n  {each.problem}; {each.fix}" if each.problem else "")
        + "\n  fatal" * each.fatal
        for each in findings
        if each not in usual
    ]
    names = {each.name for each in findings}
    return "\n".join(
        [*lines, *(f"without {each.name}" for each in usual if each.name not in names)]
    )


def check(name, text):
    check_expected(ROOT / "tests/files/preflight.txt", name, text, [*CASES, *DOCTOR])


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_of_the_nodes(name):
    """tests/files/preflight.txt has what a case does not have in common with the first one."""
    needed = re.search(r"GPUs needed: (\d+)", name)
    needs = replace(NEEDS, num_gpus=int(needed[1]) if needed else None)
    usual = [] if name == "nodes that are alike" else [*check_facts(job(), NEEDS)]
    check(name, told([*check_facts(CASES[name], needs)], usual))


@pytest.mark.parametrize("name", DOCTOR)
def test_what_the_doctor_finds(name, monkeypatch, tmp_path):
    changes, faults = DOCTOR[name]
    monkeypatch.setattr(doctor.checks, "find_software", lambda with_mpi: USUAL | changes)
    little = "little" in name
    monkeypatch.setenv("CANDLE_DATA_DIR", "/dev/null/below" if little else str(tmp_path))
    memory_bytes = 2**30 if little else 2**36
    monkeypatch.setattr(doctor.environment, "memory_limit_bytes", lambda: memory_bytes)
    for function in (FUNCTIONS | faults).items():
        monkeypatch.setattr(doctor, *function)
    of_the_machine = {"cores": "cores", "data": "a directory"}
    found = [
        replace(each, value=of_the_machine.get(each.name, each.value)) for each in doctor.examine()
    ]
    check(name, told(found).replace(str(ROOT), "$ROOT"))


def test_what_the_job_asked_for_and_why_it_is_not_there(monkeypatch, run_as):
    lack = Lack("no support", "install it")
    found = software() | {"gpus": [], "gpu_lack": lack, "gpu_ids": None}
    monkeypatch.setattr(checks, "find_software", lambda with_mpi: found)
    monkeypatch.setenv("CANDLE_P1_NODE", "a")
    monkeypatch.setenv("CANDLE_P1_GPUS_PER_NODE", "4")
    code, _, errors = run_as("none", 0, 1, *NOTHING)
    wanted = r"node a: GPUs: 4 GPUs needed \(CANDLE_P1_GPUS_PER_NODE=4\)"
    assert re.search(rf"{wanted}.*: {lack.why}. Fix: {lack.fix};", errors)
    assert (code, errors.count("\n")) == (2, 1)
    assert run_as("none", 0, 1, *NOTHING, "--gpus", "0")[0] == 0
    monkeypatch.setenv("CANDLE_P1_GPUS_PER_NODE", "0")
    assert run_as("none", 0, 1, *NOTHING)[0] == 0


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
    ("launcher", "rank", "size", "arguments", "expected", "words"),
    [
        ("srun", 0, 2, (), 2, "srun"),  # MPI knows only this rank
        ("srun", 1, 2, (), 0, None),
        ("aprun", 1, None, (), 2, "aprun"),
        ("aprun", 2, None, (), 0, None),
        ("srun", 0, 2, ("--gpus", "many"), 2, "--gpus"),
        ("srun", 1, 2, ("--gpus", "many"), 0, None),
        ("srun", 0, 2, ("--help",), 0, "--shm_gib"),
        ("srun", 1, 2, ("--help",), 0, None),
    ],
)
def test_one_rank_tells_what_concerns_all(run_as, launcher, rank, size, arguments, expected, words):
    code, output, errors = run_as(launcher, rank, size, *arguments)
    assert (code, bool(errors)) == (expected, expected == 2)
    assert arguments or errors.count("\n") <= 1
    assert words in output + errors if words else not output + errors


def test_the_error_of_a_node_without_mpi_names_the_node(monkeypatch, run_as):
    monkeypatch.setenv("CANDLE_P1_NODE", "b")
    assert run_as("none", 0, 1, connect=broken) == (2, "", "error: node b: no mpirun\n")


def test_the_command_shows_one_table(monkeypatch, run_as, tmp_path):
    monkeypatch.setattr(checks, "find_software", lambda with_mpi: software())
    file = tmp_path / "train.csv"
    file.write_text("1,2\n")
    files = ["--file", str(file), "--output", str(tmp_path / "new/results")]
    code, output, _ = run_as("none", 0, 1, *NOTHING, *files)
    assert code == 0
    rows = [line.split() for line in output.splitlines()]
    assert rows[:2] == [["launcher", "none"], ["ranks", "1", "on", "1", "node"]]
    assert ["file", "train.csv", "4", "bytes"] in rows


def test_free_space_is_that_of_the_nearest_existing_directory(monkeypatch, tmp_path):
    space = checks.free_space(tmp_path / "not" / "yet")
    assert (space.problem, space.free_bytes > 0) == (None, True)
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file " in checks.free_space(tmp_path / "file" / "below").problem
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    assert str(tmp_path) in checks.free_space(tmp_path).problem
    assert checks.find_files([tmp_path]) == {str(tmp_path): None}
    monkeypatch.setattr(checks.shutil, "disk_usage", os.readlink)  # fails
    assert checks.free_space(tmp_path).problem == f"{tmp_path}: Invalid argument"


def test_loaded_mpi_libraries(tmp_path):
    names = ["libmpi-1a2b3c.so.40", "libmpi.so.40.40.7", "libmpi_gnu_123.so.12", "libmpich.so.12"]
    others = ["MPI.openmpi.cpython-311.so", "libmpi_gtl_cuda.so.0", "libmpi_cxx.so.40"]
    lines = [f"7f-80 r-xp 00000000 fe:00 1234    /opt/lib/{name}\n" for name in names + others]
    (tmp_path / "maps").write_text("".join(lines * 2) + "7f-80 rw-p 0 0:0 0\n")
    found = checks.loaded_mpi_libraries(tmp_path / "maps")
    assert found == sorted(f"/opt/lib/{name}" for name in names)
    assert checks.loaded_mpi_libraries(tmp_path / "absent") == []


@pytest.mark.parametrize("needed", [("tensorflow", "mpi4py", "horovod"), ("jax", "mpi4py")])
def test_import_errors_are_facts(monkeypatch, needed):
    def broken(*_):
        raise ImportError("libmpi.so.12: no such file\nand more")

    for name in ("visible_gpus", "library_version", "horovod_build"):
        monkeypatch.setattr(checks, name, broken)
    monkeypatch.setattr(checks.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(checks, "choose_backend", lambda: needed[0])
    found = checks.find_software(with_mpi=True)
    assert found["unusable"] == dict.fromkeys(needed, "libmpi.so.12: no such file")
    assert found["gpus"] is None
    assert checks.find_software(with_mpi=False)["unusable"].keys() == {needed[0]}


@pytest.mark.parametrize(("visible", "ids"), [(None, ["a", "b"]), ("1", ["b"]), ("MIG-1", None)])
def test_the_gpus_that_a_rank_sees(monkeypatch, visible, ids):
    nvml = MagicMock(NVMLError=RuntimeError)
    nvml.nvmlDeviceGetCount.return_value = 2
    nvml.nvmlDeviceGetHandleByIndex.side_effect = "ab".__getitem__
    nvml.nvmlDeviceGetUUID.side_effect = str
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert checks.visible_gpu_ids() == ids
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert checks.visible_gpu_ids() is None
