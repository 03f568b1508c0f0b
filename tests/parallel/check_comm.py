"""The communicator, and what ranks must agree on before and during training."""

import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import keras
import numpy as np
import pytest
from harness import on_nodes

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.checks import Needs, loaded_mpi_libraries
from candle_p1.cluster.preflight import examine
from candle_p1.distributed.callbacks import TimeLimit
from candle_p1.distributed.comm import MpiCommunicator, agree, attempt, check_ranks, connect
from candle_p1.distributed.launch_environment import launched_rank
from candle_p1.errors import DataError, DistributedError, SetupError
from candle_p1.records import environment
from candle_p1.training.setup import check_same_data, check_same_parameters


def ranks_know_each_other(comm):
    assert isinstance(comm, MpiCommunicator)
    assert connect() is comm
    assert comm.allgather(comm.rank) == list(range(comm.size))
    assert (comm.local_rank, comm.local_size) == (comm.rank, comm.size)  # one machine
    assert (comm.node, comm.num_nodes) == (0, 1)
    layout = launched_rank()
    assert (layout.launcher, layout.rank, layout.size) == ("mpirun", comm.rank, comm.size)
    assert (layout.local_rank, layout.local_size) == (comm.rank, comm.size)
    check_ranks(layout, comm)
    assert comm.broadcast({"from": comm.rank}, root=comm.size - 1) == {"from": comm.size - 1}
    total = comm.allreduce_sum(np.full((2, 3), comm.rank + 1.0)[:, ::2])
    np.testing.assert_array_equal(total, np.full((2, 2), sum(range(1, comm.size + 1))))


def bytes_go_round_in_order(comm):
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sent = [np.full(num_bytes, comm.rank + i, np.uint8) for i, num_bytes in enumerate([3, 1 << 20])]
    waits = [comm.send_bytes(memoryview(each), after) for each in sent]
    comm.send("between", after)
    received = [bytearray(len(each)) for each in sent]
    for each in received:
        comm.receive_bytes(memoryview(each), before)
    assert comm.receive(before) == "between"
    for wait, each in zip(waits, sent, strict=True):
        wait()
        each[:] = 255  # which must not reach the other rank any more
    comm.barrier()
    assert [set(each) for each in received] == [{before}, {before + 1}]


def mpi_has_not_replaced_the_handler_of_hangup(comm):
    assert signal.getsignal(signal.SIGHUP) in (signal.SIG_DFL, signal.SIG_IGN)
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    for caught_or_blocked in (status["SigCgt"], status["SigBlk"]):
        assert not int(caught_or_blocked, 16) & 1 << signal.SIGHUP - 1


def an_error_of_one_rank_is_raised_on_all(comm):
    def fail_on_last():
        if comm.rank == comm.size - 1:
            raise DataError("is empty", "x.csv")
        return comm.rank

    with pytest.raises(DistributedError, match=rf"^rank {comm.size - 1}: x\.csv: is empty$"):
        agree(comm, attempt(fail_on_last))
    assert agree(comm, lambda: comm.rank) == comm.rank


def different_parameters_and_different_data_are_refused(comm):
    parameters = find_benchmark("nt3").initialize_parameters(argv=[])
    check_same_parameters(parameters.base, comm)
    parameters["batch_size"] += comm.rank
    with pytest.raises(DistributedError, match="batch_size"):
        check_same_parameters(parameters.base.replace(parameters), comm)

    same = {
        "files": SimpleNamespace(paths={"train": Path("train.csv")}),
        "digests": {"train": "same"},
        "sizes": {"train": {"a.npy": 100}},
    }
    check_same_data(SimpleNamespace(**same), comm)
    for other in (
        {"digests": {"train": f"from node {comm.rank}"}},
        {"sizes": {"train": {"a.npy": 100 + comm.rank}}},
        {"sizes": {"train": {f"{comm.rank}.npy": 100}}},
    ):
        with pytest.raises(DistributedError, match=r"ranks 1"):
            check_same_data(SimpleNamespace(**same | other), comm)


def all_ranks_stop_when_rank_0_is_out_of_time(comm):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    x, y = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")
    for limit_s, epochs in ((0.0 if comm.rank == 0 else 1e9, 1), (1e9, 3)):
        limit = TimeLimit(limit_s, comm)
        history = model.fit(x, y, epochs=3, verbose=0, callbacks=[limit])
        assert len(history.epoch) == epochs
        assert limit.has_ended == (epochs == 1)
    limit = TimeLimit(1e5, comm)
    limit.restore_state({"used_s": 1e6, "reached": False})
    assert len(model.fit(x, y, epochs=3, verbose=0, callbacks=[limit]).epoch) == 1


NOTHING = {"shm_gib": 0, "memory_gib": 0, "disk_gib": 0}


def the_preflight_finds_the_node_that_differs(comm):
    ranks, node = on_nodes("a,b", comm.rank), "ab"[comm.rank]
    assert (ranks.num_nodes, ranks.node) == (2, ranks.rank)
    values = {finding.name: finding.value for finding in examine(ranks, Needs(**NOTHING), node)}
    assert comm.allgather(values) == [values] * comm.size
    assert values["ranks"] == "2 on 2 nodes"
    engine, packages = values["engine"], environment.package_versions()
    assert all(values[name] == packages[name] for name in ("keras", engine))
    assert ("horovod" in values) == (engine == "horovod")
    assert values["MPI"].startswith("Open MPI")
    assert len(loaded_mpi_libraries()) == 1
    of_b = {"keras": "3.0"} if node == "b" else {}
    data = {"data": Path("/dev/null/below")} if node == "b" else {}
    with (
        patch.object(environment, "package_versions", lambda: packages | of_b),
        pytest.raises(SetupError) as raised,
    ):
        examine(ranks, Needs(**NOTHING, **data), node)
    message = str(raised.value)
    assert raised.value.agreed
    assert comm.allgather(message) == [message] * comm.size
    assert "\n  node b: keras: 3.0, " in message
    assert "\n  node b: data: /dev/null is not a directory. Fix: " in message


CHECKS = (
    ranks_know_each_other,
    bytes_go_round_in_order,
    mpi_has_not_replaced_the_handler_of_hangup,
    an_error_of_one_rank_is_raised_on_all,
    different_parameters_and_different_data_are_refused,
    all_ranks_stop_when_rank_0_is_out_of_time,
    the_preflight_finds_the_node_that_differs,
)
