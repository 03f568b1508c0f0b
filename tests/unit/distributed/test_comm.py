from __future__ import annotations

import errno
import pickle
import sys
from types import SimpleNamespace

import pytest

from candle_p1.distributed.comm import (
    MpiCommunicator,
    SerialCommunicator,
    agree,
    attempt,
    connect,
    prepare_start,
)
from candle_p1.distributed.launch_environment import MPI_VARIABLES, launched_rank
from candle_p1.errors import CandleError, DataError, DistributedError, ParameterError


class Ranks(SerialCommunicator):
    """A communicator with other ranks that have these errors."""

    def __init__(self, *errors):
        self.size, self.errors = len(errors), errors

    def gather_any(self, value):
        found = [value if error == "mine" else error for error in self.errors]
        return None if found.count(None) == len(found) else found


def test_without_a_launcher_there_is_one_rank(monkeypatch):
    for name in MPI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    comm = connect()
    assert (comm.rank, comm.size, comm.num_nodes) == (0, 1, 1)
    assert connect() is comm


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
    with pytest.raises(Aborted) as raised:
        comm.abort(7)
    assert raised.value.args == (7,)


NINE = [CandleError(f"e{rank}") for rank in range(9)]


@pytest.mark.parametrize(
    ("mine", "others", "raised", "message"),
    [
        (DataError("empty", "x.csv"), [DataError("empty", "x.csv")], DataError, r"^x\.csv.*empty"),
        (None, [ParameterError("no such file")], DistributedError, "^rank 1: no such file$"),
        (NINE[0], NINE[1:], DistributedError, "and 5 more"),
    ],
)
def test_errors_are_raised_on_all_ranks_and_say_whose_they_are(mine, others, raised, message):
    def work():
        if mine:
            raise mine

    with pytest.raises(raised, match=message) as caught:
        agree(Ranks("mine", *others), work)
    assert caught.value.agreed
    assert agree(Ranks("mine", None), lambda: 7) == 7


def test_errors_other_than_ours_are_raised_at_once():
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 / 0)


def test_data_errors_travel_between_ranks():
    error = pickle.loads(pickle.dumps(DataError("bad", "x.csv", line=3, column=2)))
    assert str(error) == "x.csv, line 3, column 2: bad"
    assert (error.line, error.column) == (3, 2)


OF_ONE_NODE = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        (OF_ONE_NODE, "^ofi"),
        (OF_ONE_NODE | {"OMPI_MCA_btl": "tcp,self"}, "tcp,self"),
        (OF_ONE_NODE | {"OMPI_COMM_WORLD_SIZE": "4"}, None),  # of two nodes
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, None),
    ],
)
def test_ranks_of_one_node_do_without_libfabric_unless_the_user_has_chosen(environ, chosen):
    found = dict(environ)
    prepare_start(launched_rank(found), found)
    assert found.get("OMPI_MCA_btl") == chosen
