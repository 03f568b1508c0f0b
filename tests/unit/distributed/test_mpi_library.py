from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from candle_p1.distributed import mpi_library
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.mpi_library import MpiLibrary, check_thread_level, mpi_in_use
from candle_p1.distributed.reducers import horovod
from candle_p1.errors import SetupError
from tools.simulated import SimulatedJob


@pytest.fixture
def mpi(monkeypatch):
    """mpi4py's module, as it is after MPI has been started with the level that a test sets."""
    module = SimpleNamespace(
        THREAD_SINGLE=0,
        THREAD_FUNNELED=1,
        THREAD_SERIALIZED=2,
        THREAD_MULTIPLE=3,
        level=3,
        version="CRAY MPICH version 8.1.28 (ANL base 3.4a2)\nconfigured: x",
        Is_initialized=lambda: True,
        Is_finalized=lambda: False,
    )
    module.Query_thread = lambda: module.level
    module.Get_library_version = lambda: module.version
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    for name in mpi_library.REQUESTS:
        monkeypatch.delenv(name, raising=False)
    return module


def test_the_library_and_its_thread_level_are_recorded(mpi, monkeypatch):
    mpi.level = 2
    assert mpi_library.describe_mpi() == {
        "mpi": {
            "library": "CRAY MPICH version 8.1.28 (ANL base 3.4a2)",
            "thread_level": "serialized",
        }
    }
    mpi.Is_initialized = lambda: False
    assert mpi_library.describe_mpi() == {}
    monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    assert mpi_in_use() is None


@pytest.mark.parametrize(
    ("version", "level", "variables", "fix"),
    [
        ("CRAY MPICH version 8.1", 2, {}, "MPICH_MAX_THREAD_SAFETY=multiple"),
        ("MPICH Version: 4.2", 1, {}, "--enable-threads=multiple"),
        ("MVAPICH2 Version: 2.3", 0, {}, "MV2_ENABLE_AFFINITY=0"),
        ("Open MPI v2.1.1, package", 2, {}, "ompi_info"),
        ("IBM Spectrum", 1, {}, "built for MPI_THREAD_MULTIPLE"),
        ("Open MPI v5.0", 2, {"MPI4PY_RC_THREAD_LEVEL": "serialized"}, "unset MPI4PY_RC_THREAD_L"),
    ],
)
def test_a_lower_level_is_an_error_of_all_ranks(mpi, monkeypatch, version, level, variables, fix):
    mpi.version, mpi.level = version, level
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    started = []
    hvd = SimpleNamespace(init=lambda: started.append(1))
    monkeypatch.setattr(horovod, "import_horovod", lambda: hvd)

    def work(comm):
        with pytest.raises(SetupError) as raised:
            horovod.HorovodReducer(comm)
        return raised.value.agreed, str(raised.value)

    ((agreed, message),) = set(SimulatedJob(2).run(work))
    assert agreed
    assert not started
    assert version.split(",")[0] in message
    assert f"MPI_THREAD_{mpi_library.LEVELS[level].upper()}" in message
    assert fix in message


def test_enough_or_no_need(mpi):
    assert MpiLibrary("Open MPI v5.0", "multiple").problem is None
    SimulatedJob(3).run(check_thread_level)
    mpi.level = 0
    check_thread_level(SerialCommunicator())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("MPICH Version:      5.0.2\nMPICH ABI:          18:2:6", "MPICH Version: 5.0.2"),
        ("Open MPI v5.0.11, package: x, ident: 5.0.11\x00\x00", "Open MPI v5.0.11"),
    ],
)
def test_the_mpi_library_is_described_in_a_line(text, line, monkeypatch):
    mpi = SimpleNamespace(Get_library_version=lambda: text)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace(), MPI=mpi))
    assert mpi_library.library_version() == line
