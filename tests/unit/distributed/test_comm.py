import errno
import sys
from types import SimpleNamespace

import pytest

from candle_p1.distributed.comm import (
    MpiCommunicator,
    SerialCommunicator,
    agree,
    attempt,
    check_ranks,
    prepare_start,
)
from candle_p1.distributed.launch_environment import launched_rank
from candle_p1.errors import CandleError, DataError, DistributedError, ParameterError, SetupError
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


def variables(text):
    return dict(word.split("=", 1) for word in text.split())


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
