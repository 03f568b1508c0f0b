"""Which ranks can share data, with simulated ranks; tests/cluster has real ones in containers."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.data import shared
from candle_p1.data.cooperative import read_together
from candle_p1.data.loading import Loading
from candle_p1.data.node_sharing import agree_on_sharing
from candle_p1.data.shared import NodeArray, allocate
from candle_p1.data.table import CsvLayout
from candle_p1.distributed import shared_file
from candle_p1.distributed.shared_file import NoRoomError, NotSharedError
from tools.simulated import SimulatedJob


@pytest.fixture
def directories(monkeypatch, tmp_path):
    """Stand-ins for /dev/shm and the directory for temporary files."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    for module in (shared, shared_file):
        monkeypatch.setattr(module, "MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    return memory, disk


def agreed(num_ranks=5, ranks_per_node=2):
    """Returns (nodes of all ranks, warning), which all ranks have to know alike."""

    def work(comm):
        sharing = agree_on_sharing(comm)
        ranks = sharing.comm
        assert (ranks.rank, ranks.size) == (comm.rank, comm.size)
        assert ranks.local.allgather(ranks.node) == [ranks.node] * ranks.local_size
        assert ranks.local_rank == ranks.local.rank
        return [ranks.node, ranks.num_nodes], sharing.warning

    results = SimulatedJob(num_ranks, ranks_per_node).run(work)
    (warning,) = {warning for _, warning in results}
    assert {num for (_, num), _ in results} == {results[-1][0][0] + 1}
    return [node for (node, _), _ in results], warning


def open_files(directory):
    """Returns what the process's open files in a directory are called in /proc."""
    files = list(Path("/proc/self/fd").iterdir())
    return [each for each in files if os.path.realpath(each).startswith(str(directory))]


def test_ranks_share_what_they_see(directories):
    memory, disk = directories
    assert agreed() == ([0, 0, 1, 1, 2], None)
    assert list(memory.iterdir()) == []
    memory.rmdir()
    assert agreed(3, 1) == ([0, 1, 2], None)  # who is alone asks nobody
    nodes, warning = agreed()
    assert nodes == [0, 0, 1, 1, 2]
    assert str(disk) in warning
    assert list(disk.iterdir()) == []


def test_ranks_that_see_nothing_in_common_have_a_copy_each(directories, tmp_path):
    for directory in directories:
        directory.rmdir()
    nodes, warning = agreed()
    assert nodes == [0, 1, 2, 3, 4]
    assert "3 nodes will hold 5 copies" in warning
    path = tmp_path / "table.csv"
    path.write_text("".join(f"{i},{i / 7:.9f}\n" for i in range(200)))
    alone = read_together(path, CsvLayout()).values

    def read(comm):
        ranks = agree_on_sharing(comm).comm
        assert Loading(comm=ranks).num_copies == comm.size
        return read_together(path, CsvLayout(), Loading(comm=ranks, block_bytes=64)).values

    for values in SimulatedJob(5, 2).run(read):
        assert values.tobytes() == alone.tobytes()


def test_a_file_that_another_rank_does_not_see_is_an_error_of_all(directories):
    memory, _ = directories

    def work(comm):
        def receive_name(value, root=0):
            del comm.broadcast
            name, error = comm.broadcast(value, root)
            return f"{name}-elsewhere", error  # in this rank's container, there is no such file

        if comm.rank == 2:
            comm.broadcast = receive_name
        with pytest.raises(NotSharedError, match="do not see each other's files"):
            NodeArray((4,), np.float32, comm, memory)

    SimulatedJob(3, 3).run(work)
    assert list(memory.iterdir()) == []
    assert open_files(memory) == []


def test_what_some_ranks_have_allocated_is_freed_if_others_find_no_room(directories, monkeypatch):
    memory, _ = directories
    reserve = NodeArray.reserve

    def reserve_in_small_memory(array, first, last):
        if array._directory == memory and first:
            raise NoRoomError("no space", memory)
        reserve(array, first, last)

    monkeypatch.setattr(NodeArray, "reserve", reserve_in_small_memory)
    arrays = SimulatedJob(2, 2).run(lambda comm: allocate((100_000,), np.float32, comm))
    sizes = [each.stat().st_size for each in open_files(memory)]
    assert all(size <= 1 for size in sizes), "as long as something refers to the mapping"
    assert [array.keep(10).size for array in arrays] == [10, 10]


@pytest.mark.parametrize(
    ("total", "free", "num_ranks", "most"),
    [
        (64, 62, 8, 30),  # Docker's default: half of it is for MPI
        (1000, 100, 2, 50),  # of much, a twentieth has to remain
        (1000, 100, 4, 36),
    ],
)
def test_mpi_has_room_left(directories, monkeypatch, total, free, num_ranks, most):
    status = SimpleNamespace(f_blocks=total, f_bavail=free, f_frsize=1 << 20)
    monkeypatch.setattr(shared_file.os, "fstatvfs", lambda file: status)
    shared_file.check_room(0, most << 20, directories[0], num_ranks)
    with pytest.raises(OSError, match=f"{free} MiB are free"):
        shared_file.check_room(0, most + 1 << 20, directories[0], num_ranks)
    status.f_blocks = 0  # no limit
    shared_file.check_room(0, 1 << 30, directories[0], num_ranks)


def test_a_table_for_which_there_is_no_room_gives_back_what_it_took(directories, monkeypatch):
    memory, disk = directories
    (disk / "table.csv").write_text("1,2\n" * 1000)
    checked = []

    def check(file, num_bytes, directory, num_ranks):
        checked.append(directory)
        if directory == memory and len(checked) > 4:
            raise OSError(28, "no room any more")

    monkeypatch.setattr(shared, "check_room", check)

    def read(comm):
        return read_together(disk / "table.csv", CsvLayout(), Loading(comm=comm, block_bytes=100))

    tables = SimulatedJob(2, 2).run(read)
    assert (checked[0], checked[-1]) == (memory, disk)
    assert all((table.values == [1, 2]).all() for table in tables)
    assert open_files(memory) == []
