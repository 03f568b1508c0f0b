from __future__ import annotations

import errno
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.distributed import comm as comm_module
from candle_p1.distributed.comm import Attempt, MpiCommunicator, SerialCommunicator
from candle_p1.distributed.launch_environment import MPI_VARIABLES
from candle_p1.errors import CandleError, DataError, DistributedError, ParameterError


class Ranks(SerialCommunicator):
    """A communicator with other ranks that have these errors."""

    def __init__(self, *errors):
        self.size, self.errors = len(errors), errors

    def gather_any(self, value):
        found = [value if error == "mine" else error for error in self.errors]
        return None if found.count(None) == len(found) else found


def fail(error):
    def work():
        raise error

    return work


def test_without_a_launcher_there_is_one_rank(monkeypatch):
    monkeypatch.setattr(comm_module, "_communicator", None)
    for name in MPI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    comm = comm_module.connect()
    assert (comm.rank, comm.size, comm.num_nodes) == (0, 1, 1)
    assert comm_module.connect() is comm


def test_the_serial_communicator_returns_what_it_is_given():
    comm = SerialCommunicator()
    array = np.arange(3)
    assert comm.broadcast("x") == "x"
    assert comm.allgather(1) == [1]
    total = comm.allreduce_sum(array)
    assert total is not array
    np.testing.assert_array_equal(total, array)


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


def test_an_attempt_returns_its_result_if_no_rank_failed():
    assert Attempt(lambda: 7).agree(Ranks("mine", None)) == 7


def test_an_error_that_all_ranks_share_is_raised_unchanged():
    error = DataError("the file is empty", "x.csv")
    with pytest.raises(DataError, match=r"x\.csv") as caught:
        Attempt(fail(error)).agree(Ranks("mine", DataError("the file is empty", "x.csv")))
    assert caught.value.agreed


def test_an_error_of_one_rank_is_raised_on_all_and_names_it():
    with pytest.raises(DistributedError, match=r"^rank 1: no such file$") as caught:
        Attempt(lambda: 7).agree(Ranks("mine", ParameterError("no such file")))
    assert caught.value.agreed


def test_many_different_errors_are_cut_short():
    errors = [CandleError(f"e{rank}") for rank in range(9)]
    with pytest.raises(DistributedError, match="and 5 more"):
        Attempt(fail(errors[0])).agree(Ranks("mine", *errors[1:]))


def test_errors_other_than_ours_are_raised_at_once():
    with pytest.raises(ZeroDivisionError):
        Attempt(lambda: 1 / 0)


def test_data_errors_travel_between_ranks():
    error = pickle.loads(pickle.dumps(DataError("bad", "x.csv", line=3, column=2)))
    assert str(error) == "x.csv, line 3, column 2: bad"
    assert (error.line, error.column) == (3, 2)
