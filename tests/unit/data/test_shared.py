"""Memory that ranks share, in huge pages; tests/cluster has real ranks in containers."""

import errno
import math
import os
import platform
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.data import shared
from candle_p1.data.cooperative import read_together
from candle_p1.data.shared import (
    HUGE_BYTES,
    HugeFile,
    NodeArray,
    agree_on_sharing,
    allocate,
    sharers,
    try_directories,
)
from candle_p1.data.source import Loading
from candle_p1.data.table import CsvLayout
from candle_p1.distributed import shared_file
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.shared_file import MEMORY, NoRoomError, NotSharedError
from candle_p1.errors import DataError
from tools.simulated import SimulatedJob

NUM_PAGES = 3
HAS_HUGE = shared.are_available()
CAN_COLLAPSE = HAS_HUGE and tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)


def mapping_of(array):
    """Returns what the kernel says about the memory that an array is in."""
    address = array.ctypes.data
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = re.match(r"([0-9a-f]+)-([0-9a-f]+)|", entry).groups()
        if first and int(first, 16) <= address < int(last, 16):
            return entry
    raise AssertionError("the array is in no mapping")


def flags_of(array):
    return re.search("VmFlags:.*", mapping_of(array))[0]


@pytest.fixture(autouse=True)
def no_page_is_slow(monkeypatch):
    """Otherwise, whether there are huge pages depends on time."""
    monkeypatch.setattr(shared, "SLOW_S", math.inf)


@pytest.fixture
def file():
    """A function that returns the descriptor of a file of some pages without a name."""
    with ExitStack() as stack:

        def create(directory=MEMORY):
            opened = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            os.truncate(opened.fileno(), NUM_PAGES * HUGE_BYTES)
            return opened.fileno()

        yield create


def mapped(descriptor, in_memory=True):
    return HugeFile(descriptor, NUM_PAGES * HUGE_BYTES, in_memory=in_memory)


def test_the_matrix_of_a_single_rank_is_private_and_in_huge_pages(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("1,2,3\n4,5,6\n")
    values = read_together(path, CsvLayout()).values
    assert values.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert sharers(values).size == 1
    assert values.flags.writeable
    assert re.match(r"\S+ rw-p \S+ 00:00 0 *\n", mapping_of(values)), "no file"
    assert " hg" in flags_of(values) or not HAS_HUGE


@pytest.mark.parametrize("directory", [MEMORY, Path(tempfile.gettempdir())])
def test_what_others_have_written_stays(file, directory):
    descriptor, in_memory = file(directory), directory == MEMORY
    one, other = (mapped(descriptor, in_memory) for _ in range(2))
    first, second = (np.frombuffer(each.memory, np.uint8) for each in (one, other))
    assert first.ctypes.data % HUGE_BYTES == second.ctypes.data % HUGE_BYTES == 0
    first[:100] = 1
    filled = other.fill(50, HUGE_BYTES + 1)
    second[100 : HUGE_BYTES + 1] = 2
    one.fill(HUGE_BYTES - 5, NUM_PAGES * HUGE_BYTES)
    assert not (filled and not in_memory)
    assert first[:100].tolist() == [1] * 100
    assert (first[100 : HUGE_BYTES + 1] == 2).all()
    assert not first[HUGE_BYTES + 1 :].any()


def test_a_file_on_disk_or_a_kernel_that_cannot_is_asked_once(file, monkeypatch):
    asked, libc = [], shared._libc()

    def refuse(*_):
        asked.append(shared.ctypes.set_errno(errno.EINVAL))
        return -1

    fake = SimpleNamespace(mmap=libc.mmap, munmap=libc.munmap, madvise=refuse)
    monkeypatch.setattr(shared, "_libc", lambda: fake)
    monkeypatch.setattr(shared, "are_available", lambda: True)
    in_memory, on_disk = mapped(file()), mapped(file(), in_memory=False)
    assert not any(huge.fill(0, 10) for huge in (in_memory, in_memory, on_disk))
    assert len(asked) == 1


def test_a_lack_of_room_is_an_error_and_not_a_signal(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def work(comm):
        array = NodeArray((HUGE_BYTES,), np.float32, comm)
        comm.barrier()
        with pytest.raises(NoRoomError, match="No space left"):
            array.fill(0, HUGE_BYTES)
        comm.barrier()
        array.keep(0)

    monkeypatch.setattr(shared, "are_available", lambda: True)
    monkeypatch.setattr(shared.os, "posix_fallocate", refuse)
    SimulatedJob(2, 2).run(work)


def test_the_memory_is_freed_with_the_last_array():
    def work(comm):
        array = NodeArray((HUGE_BYTES,), np.float32, comm)
        view = array.keep(10)[2:5]
        assert sharers(view) is comm
        return re.search(r"candle_p1-\w+", mapping_of(view))[0]

    files = SimulatedJob(2, 2).run(work)
    assert not any(file in Path("/proc/self/maps").read_text() for file in files)


@pytest.mark.parametrize("slow_s", [0.0, 100.0])
@pytest.mark.skipif(not CAN_COLLAPSE, reason="no huge pages for files in memory on request")
def test_no_more_huge_pages_are_asked_for_once_one_was_slow(monkeypatch, file, slow_s):
    monkeypatch.setattr(shared, "SLOW_S", slow_s)
    array = NodeArray((NUM_PAGES * HUGE_BYTES,), np.float32, SerialCommunicator())
    values = array.array
    for first in range(0, len(values), HUGE_BYTES):
        assert array.fill(first, first + HUGE_BYTES), "stores to private memory are always possible"
        values[first : first + HUGE_BYTES] = 1
    assert " hg" in flags_of(values)
    assert (" nh" in flags_of(values[-1:])) == (slow_s == 0)
    descriptor = file()
    huge = mapped(descriptor)
    assert huge.fill(0, NUM_PAGES * HUGE_BYTES) == (slow_s > 0)
    small = os.sysconf("SC_PAGE_SIZE") * (NUM_PAGES - 1)
    expected = HUGE_BYTES + small if slow_s == 0 else NUM_PAGES * HUGE_BYTES
    assert os.fstat(descriptor).st_blocks * 512 == expected, "only the first slow one is huge"
    pages = re.search(r"ShmemPmdMapped: *(\d+)", mapping_of(np.frombuffer(huge.memory, np.uint8)))
    assert int(pages[1]) << 10 == expected // HUGE_BYTES * HUGE_BYTES


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
        ranks, warning = agree_on_sharing(comm)
        assert (ranks.rank, ranks.size) == (comm.rank, comm.size)
        assert ranks.local.allgather(ranks.node) == [ranks.node] * ranks.local_size
        assert ranks.local_rank == ranks.local.rank
        return [ranks.node, ranks.num_nodes], warning

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
    assert agreed(3, 1) == ([0, 1, 2], None)
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
        loading = Loading(comm=agree_on_sharing(comm)[0], block_bytes=64)
        assert loading.num_copies == comm.size
        return read_together(path, CsvLayout(), loading).values

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
    assert list(memory.iterdir()) == open_files(memory) == []


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


def test_no_space_in_memory_and_on_disk_is_an_error():
    def refuse(directory):
        raise NoRoomError("no room", directory)

    with pytest.raises(DataError, match=r"/dev/shm.*TMPDIR"):
        try_directories(refuse, SerialCommunicator(), None)
