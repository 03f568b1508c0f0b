from __future__ import annotations

import sys

import pytest

from candle_p1.cluster import checks, doctor
from candle_p1.distributed import backend
from candle_p1.distributed.gpus import Lack
from candle_p1.distributed.mpi_library import MpiLibrary
from candle_p1.errors import SetupError

VERSIONS = dict.fromkeys(("keras", "candle-p1", "mpi4py", "numpy", "pandas"), "3.1")
OPEN_MPI = ("Open MPI 5", "mpirun (Open MPI) 5")
HYDRA = "HYDRA build details: Version: 5.0.2"
HOROVOD = {"tensorflow": "2.18", "horovod": "0.28.1"}
JAX = {"jax": "0.10.2"}


@pytest.fixture
def findings(monkeypatch):
    """Returns the findings by name, for an environment with these packages."""

    def examine(told="", mpi=OPEN_MPI, gpus=(), faults=None, **versions):
        monkeypatch.delitem(sys.modules, "keras", raising=False)
        monkeypatch.setenv("KERAS_BACKEND", told)
        monkeypatch.setattr(backend, "find_spec", lambda name: name if name in versions else None)
        monkeypatch.setattr(doctor.environment, "package_versions", lambda: VERSIONS | versions)
        monkeypatch.setattr(doctor, "launcher_variable", lambda: None)
        monkeypatch.setattr(doctor, "start_alone", lambda: MpiLibrary(mpi[0], "multiple"))
        monkeypatch.setattr(doctor, "find_mpirun", lambda: "/bin/mpirun")
        monkeypatch.setattr(doctor, "mpirun_version", lambda path: mpi[1])
        monkeypatch.setattr(checks, "why_none", lambda backend: Lack("there is none", ""))
        monkeypatch.setattr(checks, "visible_gpu_ids", lambda: None)
        monkeypatch.setattr(checks, "loaded_mpi_libraries", list)
        monkeypatch.setattr(checks.importlib, "import_module", lambda name: None)
        for name, found in (("library_version", mpi[0]), ("horovod_build", {"mpi": True})):
            monkeypatch.setattr(checks, name, lambda found=found: found)
        monkeypatch.setattr(checks, "visible_gpus", lambda backend: list(gpus))
        for name, fault in (faults or {}).items():
            monkeypatch.setattr(doctor, name, fault)
        return {finding.name: finding for finding in doctor.examine()}

    return examine


@pytest.mark.parametrize(
    ("environment", "values"),
    [
        (HOROVOD | JAX | {"gpus": ["H100"] * 2}, HOROVOD | {"GPUs": "2 x H100"}),
        (JAX, {"jax": "0.10.2", "engine": "jax", "GPUs": "none: there is none"}),
        (JAX | {"mpi": ("MPICH Version: 5.0.2", HYDRA)}, {"launcher": f"{HYDRA} (/bin/mpirun)"}),
    ],
)
def test_an_environment_that_is_complete(findings, environment, values):
    found = findings(**environment)
    assert {name: found[name].value for name in values} == values
    assert ("Horovod" in found) == ("tensorflow" in environment)
    assert found.keys() >= {"cores", "memory", "data", "benchmarks", "launcher", "MPI threads"}
    assert not any(finding.fatal for finding in found.values())


@pytest.mark.parametrize(
    ("environment", "name", "words"),
    [
        (JAX | {"mpi": ("MPICH Version: 5.0.2", OPEN_MPI[1])}, "launcher", ""),
        ({}, "tensorflow", "not installed"),
        (JAX | {"told": "torch"}, "keras", "torch"),
    ],
)
def test_what_keeps_ranks_from_training_is_fatal(findings, environment, name, words):
    found = findings(**environment)[name]
    assert (found.fatal, words in found.problem) == (True, True)
    assert "candle-p1[cpu]" in found.fix or words != "not installed"


def test_what_does_not_keep_them_from_it_is_not(findings, monkeypatch):
    monkeypatch.setenv("CANDLE_DATA_DIR", "/dev/null/below")
    monkeypatch.setattr(doctor.environment, "memory_limit_bytes", lambda: 2**30)
    monkeypatch.setattr(doctor, "list_benchmarks", list)
    found = findings(**JAX)
    for name in ("data", "memory", "benchmarks"):
        assert (found[name].problem is None, found[name].fatal) == (False, False)


def test_where_mpi_and_its_launcher_do_not_start(findings):
    def broken(*_):
        raise SetupError("no mpirun")

    faults = {"find_mpirun": broken, "data_directory": broken, "start_alone": lambda: int("no MPI")}
    found = findings(**JAX, faults=faults)
    assert found["MPI threads"].value.startswith("not examined")
    assert (found["launcher"].problem, found["launcher"].fatal) == ("no mpirun", True)
    assert (found["data"].problem, found["data"].fatal) == ("no mpirun", False)
