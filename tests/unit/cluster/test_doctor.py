"""What the doctor finds in environments with one engine, the other, or none."""

from __future__ import annotations

import sys

import pytest

from candle_p1.cluster import doctor
from candle_p1.distributed import backend
from candle_p1.distributed.gpus import Lack
from candle_p1.distributed.mpi_library import MpiLibrary

VERSIONS = {"keras": "3.15", "numpy": "2.0", "pandas": "3.1", "mpi4py": "4.1"}


@pytest.fixture
def findings(monkeypatch):
    """Returns the findings by name, for an environment with these packages."""

    def examine(told="", level="multiple", mpi=("Open MPI 5", "mpirun (Open MPI) 5"), **versions):
        monkeypatch.delitem(sys.modules, "keras", raising=False)
        monkeypatch.setenv("KERAS_BACKEND", told)
        monkeypatch.setattr(backend, "find_spec", lambda name: name if name in versions else None)
        monkeypatch.setattr(doctor.environment, "package_versions", lambda: VERSIONS | versions)
        monkeypatch.setattr(doctor, "launcher_variable", lambda: None)
        monkeypatch.setattr(doctor, "start_alone", lambda: MpiLibrary(mpi[0], level))
        monkeypatch.setattr(doctor, "_launcher", lambda: mpi[1])
        monkeypatch.setattr(doctor, "why_none", lambda backend: Lack("there is none", ""))
        for name, found in (("mpi_library", mpi[0]), ("horovod_build", {"mpi": True})):
            monkeypatch.setattr(doctor.installation, name, lambda found=found: found)
        monkeypatch.setattr(doctor.installation, "visible_gpus", lambda backend: [])
        return {finding.name: finding for finding in doctor.examine()}

    return examine


def test_with_tensorflow_and_horovod(findings):
    found = findings(tensorflow="2.18", jax="0.10.2", horovod="0.28.1")
    assert found["Keras backend"].value == "tensorflow 2.18"
    assert found["engine"].value.startswith("horovod")
    assert found["Horovod"].value.startswith("0.28.1")
    assert not [finding for finding in found.values() if finding.fatal]


def test_with_jax_alone(findings):
    found = findings(jax="0.10.2")
    assert found["Keras backend"].value == "jax 0.10.2"
    assert found["engine"].value.startswith("jax")
    assert "Horovod" not in found
    assert not [finding for finding in found.values() if finding.fatal]


def test_only_horovod_calls_mpi_from_several_threads(findings):
    assert findings(tensorflow="2.18", horovod="0.28.1", level="serialized")["MPI threads"].fatal
    threads = findings(jax="0.10.2", level="serialized")["MPI threads"]
    assert (threads.value, threads.problem) == ("serialized", None)


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


@pytest.mark.parametrize(("told", "lacking"), [("", "TensorFlow"), ("jax", "JAX")])
def test_without_a_backend(findings, told, lacking):
    finding = findings(told)["Keras backend"]
    assert finding.fatal
    assert finding.problem == f"{lacking} is not installed"
    assert "candle-p1[cpu]" in finding.fix
    assert "candle-p1[jax-mpi]" in finding.fix


def test_a_backend_that_is_unknown(findings):
    found = findings("torch", jax="0.10.2")
    assert found["Keras backend"].fatal
    assert "torch" in found["Keras backend"].problem
    assert "engine" not in found
    assert "memory" in found
