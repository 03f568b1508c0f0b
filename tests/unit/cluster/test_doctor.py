"""What the doctor finds in environments with one engine, the other, or none."""

from __future__ import annotations

import sys

import pytest

from candle_p1.cluster import checks, doctor
from candle_p1.distributed import backend
from candle_p1.distributed.gpus import Lack
from candle_p1.distributed.mpi_library import MpiLibrary
from candle_p1.errors import SetupError

VERSIONS = dict.fromkeys(("keras", "candle-p1", "mpi4py", "numpy", "pandas"), "3.1")


@pytest.fixture
def findings(monkeypatch):
    """Returns the findings by name, for an environment with these packages."""

    def examine(
        told="", level="multiple", mpi=("Open MPI 5", "mpirun (Open MPI) 5"), gpus=(), **versions
    ):
        monkeypatch.delitem(sys.modules, "keras", raising=False)
        monkeypatch.setenv("KERAS_BACKEND", told)
        monkeypatch.setattr(backend, "find_spec", lambda name: name if name in versions else None)
        monkeypatch.setattr(doctor.environment, "package_versions", lambda: VERSIONS | versions)
        monkeypatch.setattr(doctor, "launcher_variable", lambda: None)
        monkeypatch.setattr(doctor, "start_alone", lambda: MpiLibrary(mpi[0], level))
        monkeypatch.setattr(doctor, "find_mpirun", lambda: "/bin/mpirun")
        monkeypatch.setattr(doctor, "mpirun_version", lambda path: mpi[1])
        monkeypatch.setattr(checks, "why_none", lambda backend: Lack("there is none", ""))
        monkeypatch.setattr(checks, "visible_gpu_ids", lambda: None)
        monkeypatch.setattr(checks, "loaded_mpi_libraries", list)
        monkeypatch.setattr(checks.importlib, "import_module", lambda name: None)
        for name, found in (("mpi_library", mpi[0]), ("horovod_build", {"mpi": True})):
            monkeypatch.setattr(checks.installation, name, lambda found=found: found)
        monkeypatch.setattr(checks.installation, "visible_gpus", lambda backend: list(gpus))
        return {finding.name: finding for finding in doctor.examine()}

    return examine


@pytest.mark.parametrize(
    ("versions", "values"),
    [
        (
            {"tensorflow": "2.18", "jax": "0.10.2", "horovod": "0.28.1", "gpus": ["H100"] * 2},
            {"tensorflow": "2.18", "engine": "horovod", "horovod": "0.28.1", "GPUs": "2 x H100"},
        ),
        ({"jax": "0.10.2"}, {"jax": "0.10.2", "engine": "jax", "GPUs": "none: there is none"}),
    ],
)
def test_an_environment_that_is_complete(findings, versions, values):
    found = findings(**versions)
    assert {name: found[name].value for name in values} == values
    assert ("Horovod" in found) == ("tensorflow" in versions)
    assert found.keys() >= {"cores", "memory", "data", "benchmarks", "launcher", "MPI threads"}
    assert not [finding for finding in found.values() if finding.fatal]


def test_only_horovod_calls_mpi_from_several_threads(findings):
    assert findings(tensorflow="2.18", horovod="0.28.1", level="serialized")["MPI"].fatal
    found = findings(jax="0.10.2", level="serialized")
    assert (found["MPI threads"].value, found["MPI"].problem) == ("serialized", None)


@pytest.mark.parametrize(
    ("library", "launcher", "fits"),
    [
        ("Open MPI v5.0.11", "HYDRA build details: Version: 5.0.2", False),
        ("MPICH Version: 5.0.2", "mpirun (Open MPI) 5.0.11", False),
        ("MPICH Version: 5.0.2", "HYDRA build details: Version: 5.0.2", True),
        ("IBM Spectrum MPI", "mpirun (IBM Spectrum MPI) 10.4", True),
    ],
)
def test_the_launcher_of_another_mpi_is_found(findings, library, launcher, fits):
    found = findings(mpi=(library, launcher), jax="0.10.2")["launcher"]
    assert (found.fatal, found.problem is None) == (not fits, fits)


@pytest.mark.parametrize(("told", "missing"), [("", "tensorflow"), ("jax", "jax")])
def test_without_a_backend(findings, told, missing):
    finding = findings(told)[missing]
    assert finding.fatal
    assert "not installed" in finding.problem
    assert "candle-p1[cpu]" in finding.fix
    assert "candle-p1[jax-mpi]" in finding.fix


def test_a_backend_that_is_unknown(findings):
    found = findings("torch", jax="0.10.2")
    assert found["keras"].fatal
    assert "torch" in found["keras"].problem
    assert "memory" in found


def test_what_does_not_keep_ranks_from_training_is_not_fatal(findings, monkeypatch):
    monkeypatch.setenv("CANDLE_DATA_DIR", "/dev/null/below")
    monkeypatch.setattr(doctor.environment, "memory_limit_bytes", lambda: 2**30)
    monkeypatch.setattr(doctor, "list_benchmarks", list)
    found = findings(jax="0.10.2")
    for name in ("data", "memory", "benchmarks"):
        assert (found[name].problem is None, found[name].fatal) == (False, False)


def test_where_mpi_and_its_launcher_do_not_start(findings, monkeypatch):
    real = doctor.examine

    def broken(*_):
        raise SetupError("no mpirun")

    def examine():
        monkeypatch.setattr(doctor, "find_mpirun", broken)
        monkeypatch.setattr(doctor, "start_alone", lambda: int("no MPI"))
        monkeypatch.setattr(doctor, "data_directory", broken)
        return real()

    monkeypatch.setattr(doctor, "examine", examine)
    found = findings(jax="0.10.2")
    assert found["MPI threads"].value.startswith("not examined")
    assert (found["launcher"].problem, found["launcher"].fatal) == ("no mpirun", True)
    assert (found["data"].problem, found["data"].fatal) == ("no mpirun", False)
