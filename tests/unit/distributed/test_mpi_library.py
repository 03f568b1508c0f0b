import sys
from types import SimpleNamespace

import pytest

from candle_p1.distributed import mpi_library
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.mpi_library import check_thread_level, describe_mpi
from candle_p1.distributed.reducers import horovod
from candle_p1.errors import SetupError
from tools.simulated import SimulatedJob

MPICH = "MPICH Version:      4.2\nMPICH ABI:          18:2:6"
OPEN_MPI = "Open MPI v5.0.11, package: x, ident: 5.0.11\x00\x00"


@pytest.fixture
def mpi(monkeypatch):
    """mpi4py's module, as it is after MPI has been started with the level that a test sets."""
    module = SimpleNamespace(level=3, version=OPEN_MPI, is_started=True)
    for level, name in enumerate(mpi_library.LEVELS):
        setattr(module, f"THREAD_{name.upper()}", level)
    module.Is_initialized, module.Is_finalized = lambda: module.is_started, lambda: False
    module.Query_thread, module.Get_library_version = lambda: module.level, lambda: module.version
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    for name in mpi_library.REQUESTS:
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.mark.parametrize(
    ("version", "line"), [(MPICH, "MPICH Version: 4.2"), (OPEN_MPI, "Open MPI v5.0.11")]
)
def test_the_library_and_its_thread_level_are_recorded(mpi, version, line):
    mpi.version, mpi.level = version, 2
    assert describe_mpi() == {"mpi": {"library": line, "thread_level": "serialized"}}
    mpi.is_started = False
    assert describe_mpi() == {}


@pytest.mark.parametrize(
    ("version", "level", "variables", "fix"),
    [
        ("CRAY MPICH version 8.1", 2, {}, "MPICH_MAX_THREAD_SAFETY=multiple"),
        ("MPICH Version: 4.2", 1, {}, "--enable-threads=multiple"),
        ("IBM Spectrum", 0, {}, "built for MPI_THREAD_MULTIPLE"),
        ("Open MPI v5.0", 2, {"MPI4PY_RC_THREAD_LEVEL": "serialized"}, "unset MPI4PY_RC_THREAD_L"),
    ],
)
def test_a_lower_level_is_an_error_of_all_ranks(mpi, monkeypatch, version, level, variables, fix):
    mpi.version, mpi.level = version, level
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    hvd = SimpleNamespace(init=lambda: pytest.fail("Horovod has been started"))
    monkeypatch.setattr(horovod, "import_horovod", lambda: hvd)

    def work(comm):
        with pytest.raises(SetupError) as raised:
            horovod.HorovodReducer(comm)
        return raised.value.agreed, str(raised.value)

    ((agreed, message),) = set(SimulatedJob(2).run(work))
    assert agreed
    for words in (version, f"MPI_THREAD_{mpi_library.LEVELS[level].upper()}", fix):
        assert words in message


def test_enough_or_no_need(mpi):
    SimulatedJob(3).run(check_thread_level)
    mpi.level = 0
    check_thread_level(SerialCommunicator())
