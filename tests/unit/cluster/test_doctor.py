import pytest

from candle_p1.cluster import doctor
from candle_p1.distributed.gpus import Lack
from candle_p1.distributed.mpi_library import MpiLibrary
from candle_p1.errors import SetupError

OPEN_MPI, MPICH = "Open MPI v5.0.11", "MPICH Version: 5.0.2"
HYDRA = "HYDRA build details: Version: 5.0.2"
NAMES = ("Python", "candle-p1", "keras", "mpi4py", "horovod", "numpy", "pandas")
VERSIONS = dict.fromkeys(NAMES, "3.1")
JAX = {"backend": "jax", "packages": VERSIONS | {"jax": "0.10.2"}, "horovod": {}}


@pytest.fixture
def findings(monkeypatch):
    """Returns the findings by name, where this software is found and functions have faults."""

    def findings(launcher="mpirun (Open MPI) 5", faults=None, **changes):
        software = {
            "packages": VERSIONS | {"tensorflow": "2.18"},
            "mpi_library": OPEN_MPI,
            "horovod": {"mpi": True},
            "gpus": [],
            "gpu_lack": Lack("there is none", ""),
        }
        monkeypatch.setattr(
            doctor.checks, "find_software", lambda with_mpi: software | {"mpi": None} | changes
        )
        functions = {
            "launcher_variable": lambda: None,
            "start_alone": lambda: MpiLibrary(OPEN_MPI, "multiple"),
            "find_mpirun": lambda: "/bin/mpirun",
            "mpirun_version": lambda path: launcher,
        }
        for name, function in (functions | (faults or {})).items():
            monkeypatch.setattr(doctor, name, function)
        return {finding.name: finding for finding in doctor.examine()}

    return findings


@pytest.mark.parametrize(
    ("software", "values"),
    [
        ({"gpus": ["H100"] * 2, "gpu_lack": None}, {"horovod": "3.1", "GPUs": "2 x H100"}),
        (JAX, {"jax": "0.10.2", "engine": "jax", "GPUs": "none: there is none"}),
        ({"mpi_library": MPICH, "launcher": HYDRA}, {"launcher": f"{HYDRA} (/bin/mpirun)"}),
    ],
)
def test_an_environment_that_is_complete(findings, software, values):
    found = findings(**software)
    assert {name: found[name].value for name in values} == values
    assert ("Horovod" in found) == ("jax" not in values)
    assert found.keys() >= {"cores", "memory", "data", "benchmarks", "launcher", "MPI threads"}
    assert not any(finding.fatal for finding in found.values())


@pytest.mark.parametrize(
    ("software", "name", "words"),
    [
        ({"mpi_library": MPICH}, "launcher", "MPICH"),
        ({"packages": VERSIONS}, "tensorflow", "not installed"),
        ({"unusable": {"keras": "torch is no backend"}}, "keras", "torch"),
    ],
)
def test_what_keeps_ranks_from_training_is_fatal(findings, software, name, words):
    found = findings(**software)[name]
    assert (found.fatal, words in found.problem) == (True, True)


def test_what_does_not_keep_them_from_it_is_not(findings, monkeypatch):
    monkeypatch.setenv("CANDLE_DATA_DIR", "/dev/null/below")
    monkeypatch.setattr(doctor.environment, "memory_limit_bytes", lambda: 2**30)
    found = findings(faults={"list_benchmarks": list})
    for name in ("data", "memory", "benchmarks"):
        assert (found[name].problem is None, found[name].fatal) == (False, False)


def test_where_mpi_and_its_launcher_do_not_start(findings):
    def broken(*_):
        raise SetupError("no mpirun")

    faults = {"find_mpirun": broken, "data_directory": broken, "start_alone": lambda: int("no MPI")}
    found = findings(faults=faults)
    assert found["MPI threads"].value.startswith("not examined")
    assert (found["launcher"].problem, found["launcher"].fatal) == ("no mpirun", True)
    assert (found["data"].problem, found["data"].fatal) == ("no mpirun", False)
