import errno
import sys
from types import SimpleNamespace

import pytest

from candle_p1.distributed import mpi_library
from candle_p1.distributed.comm import (
    MpiCommunicator,
    SerialCommunicator,
    agree,
    attempt,
    check_ranks,
    prepare_start,
)
from candle_p1.distributed.launch_environment import launched_rank
from candle_p1.distributed.mpi_library import check_thread_level, describe_mpi
from candle_p1.distributed.reducers import horovod
from candle_p1.errors import CandleError, DataError, DistributedError, ParameterError, SetupError
from tests.unit.distributed.test_launch_environment import variables
from tools.simulated import SimulatedJob


class Aborted(BaseException):
    pass


def test_ranks_are_ended_although_their_terminal_has_gone(monkeypatch):
    """Otherwise this process would end as usual, and a framework might wait for the others."""

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    def abort(code):
        raise Aborted(code)

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(flush=fail))
    comm = object.__new__(MpiCommunicator)
    comm._ranks = SimpleNamespace(Abort=abort)
    with pytest.raises(Aborted, match="7"):
        comm.abort(7)


BAD = DataError("bad", "x.csv", line=3, column=2)


@pytest.mark.parametrize(
    ("errors", "raised", "message"),
    [
        ([BAD, BAD], DataError, "^x.csv, line 3, column 2: bad$"),
        ([None, ParameterError("no such file")], DistributedError, "^rank 1: no such file$"),
        ([CandleError(f"e{rank}") for rank in range(9)], DistributedError, "and 5 more"),
    ],
)
def test_errors_are_raised_on_all_ranks_and_say_whose_they_are(errors, raised, message):
    def work(comm):
        def fail():
            if error := errors[comm.rank]:
                raise error

        with pytest.raises(raised, match=message) as caught:
            agree(comm, fail)
        return caught.value.agreed and agree(comm, lambda: 7)

    assert set(SimulatedJob(len(errors)).run(work)) == {7}


def test_errors_other_than_ours_are_raised_at_once():
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 / 0)


OF_ONE_NODE = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        (f"{OF_ONE_NODE} OMPI_COMM_WORLD_SIZE=2", "^ofi"),
        (f"{OF_ONE_NODE} OMPI_COMM_WORLD_SIZE=2 OMPI_MCA_btl=tcp,self", "tcp,self"),
        (f"{OF_ONE_NODE} OMPI_COMM_WORLD_SIZE=4", None),  # of two nodes
        ("SLURM_PROCID=0 SLURM_STEP_ID=0", None),
    ],
)
def test_ranks_of_one_node_do_without_libfabric_unless_the_user_has_chosen(text, chosen):
    environ = variables(text)
    prepare_start(launched_rank(environ), environ)
    assert environ.get("OMPI_MCA_btl") == chosen


def test_ranks_that_mpi_knows_are_not_refused():
    for environ in ({}, {"PMIX_RANK": "0"}):  # which does not say how many there are
        check_ranks(launched_rank(environ), SerialCommunicator())
    with pytest.raises(SetupError, match=r"aprun .* rank 5.* 0 of 1"):
        check_ranks(launched_rank({"ALPS_APP_PE": "5"}), SerialCommunicator())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "text",
    [
        "SLURM_STEP_ID=0 SLURM_PROCID={} SLURM_NTASKS=8",
        "HOROVOD_RANK={} HOROVOD_SIZE=8",
        "OMPI_COMM_WORLD_RANK={} OMPI_COMM_WORLD_SIZE=8",
    ],
)
def test_processes_that_mpi_does_not_join_are_refused_but_may_run_alone(text, rank):
    environ = variables(text.format(rank))
    seen = ", ".join(word for word in text.format(rank).split() if "STEP" not in word)
    found = rf" {rank} of 8 \({seen}\), .* 0 of 1: .*--mpi=pmix.*CANDLE_P1_SINGLE_PROCESS=1"
    with pytest.raises(SetupError, match=found) as raised:
        check_ranks(launched_rank(environ), SerialCommunicator())
    assert (raised.value.agreed, raised.value.printed) == (False, rank > 0)
    check_ranks(launched_rank(environ | {"CANDLE_P1_SINGLE_PROCESS": "1"}), SerialCommunicator())


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
    check_thread_level(SerialCommunicator())
    mpi.level = 3
    SimulatedJob(3).run(check_thread_level)
    mpi.is_started = False
    assert describe_mpi() == {}


@pytest.mark.parametrize(
    ("version", "level", "asked", "fix"),
    [
        ("CRAY MPICH version 8.1", 2, {}, "MPICH_MAX_THREAD_SAFETY=multiple"),
        ("MPICH Version: 4.2", 1, {}, "--enable-threads=multiple"),
        ("IBM Spectrum", 0, {}, "built for MPI_THREAD_MULTIPLE"),
        ("Open MPI v5.0", 2, {"MPI4PY_RC_THREAD_LEVEL": "serialized"}, "unset MPI4PY_RC_THREAD_L"),
    ],
)
def test_a_lower_level_is_an_error_of_all_ranks(mpi, monkeypatch, version, level, asked, fix):
    mpi.version, mpi.level = version, level
    for name, value in asked.items():
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
