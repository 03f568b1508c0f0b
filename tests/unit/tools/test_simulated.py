import numpy as np
import pytest

from candle_p1.errors import DataError, DistributedError
from tools.simulated import WHOLE_RUN, SimulatedJob


def test_ranks_communicate_as_those_of_a_real_job():
    def work(comm):
        assert (comm.node, comm.local_rank) == divmod(comm.rank, 3)
        assert (comm.num_nodes, comm.local_size) == (3, 1 if comm.node == 2 else 3)
        comm.barrier()
        assert comm.broadcast({"from": comm.rank}, root=5) == {"from": 5}
        assert comm.allgather(comm.rank) == list(range(7))
        assert comm.gather(comm.rank) == (None if comm.rank else list(range(7)))
        assert comm.local.allgather(comm.rank)[0] == 3 * comm.node
        array = np.array([[comm.rank, 1]], np.int32)
        assert comm.allreduce_sum(array).tolist() == [[21, 7]]
        largest = comm.allreduce_max(array)
        assert (largest.dtype, largest.tolist()) == (np.int32, [[6, 1]])
        comm.send(comm.rank, (comm.rank + 1) % 7)
        assert comm.receive((comm.rank - 1) % 7) == (comm.rank - 1) % 7
        comm.send_bytes(memoryview(bytes([comm.rank, 1])), (comm.rank + 1) % 7)()
        received = bytearray(2)
        comm.receive_bytes(memoryview(received), (comm.rank - 1) % 7)
        assert list(received) == [(comm.rank - 1) % 7, 1]
        shared = np.full(8, comm.node, np.float32)
        comm.share_between_nodes(shared, [(0, 2), (2, 3), (3, 8)])
        if comm.local_rank == 0:
            assert shared.tolist() == [0, 0, 1, 2, 2, 2, 2, 2]
        return comm.rank

    assert SimulatedJob(7, ranks_per_node=3).run(work) == list(range(7))


def test_flags_and_values_of_some_ranks_reach_all():
    def work(comm):
        assert not comm.any(False)
        assert comm.any(comm.rank == 2)
        assert comm.collect(None) == []
        assert comm.collect(comm.rank * 10 if comm.rank % 2 else None) == [(1, 10), (3, 30)]
        assert comm.first(None) is None
        assert comm.first("late" if comm.rank else None) == (1, "late")
        assert comm.gather_any(None) is None
        assert comm.gather_any(comm.rank % 2 or None) == ([None, 1, None, 1] * (not comm.rank))
        assert comm.reduce(str(comm.rank), str.__add__) == (None if comm.rank else "0123")
        assert comm.find_different({"a": 1}) == []
        assert comm.find_different({"a": comm.rank // 3}) == [3]

    SimulatedJob(4).run(work)


def test_a_rank_that_fails_ends_the_others():
    def work(comm):
        if comm.rank == 1:
            raise DataError("is empty", "x.csv")
        comm.barrier()

    with pytest.raises(DataError, match=r"x\.csv"):
        SimulatedJob(5).run(work)


def test_different_collectives_are_an_error():
    with pytest.raises(DistributedError, match="rank 0 barrier, rank 1 gather"):
        SimulatedJob(2).run(lambda comm: comm.gather(1) if comm.rank else comm.barrier())


def test_what_is_received_is_counted_by_phase():
    def work(comm):
        with comm.job.phase("tell", comm.rank):
            comm.broadcast(b"x" * 1000)
        with comm.job.phase("ask", comm.rank):
            comm.gather(b"x" * 1000)
        comm.allreduce_sum(np.zeros(4))

    job = SimulatedJob(8)
    job.run(work)
    told, asked, rest = (job.traffic[phase] for phase in ("tell", "ask", WHOLE_RUN))
    assert told[:, 0].tolist() == [0] + [1] * 7
    assert 1000 < told[1, 1] < 1050
    assert asked[:, 0].tolist() == [7] + [0] * 7
    assert 7000 < asked[0, 1] < 7350
    assert rest.tolist() == [[3, 3 * 32]] * 8
