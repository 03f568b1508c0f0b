"""Memory in huge pages: private where a node has one rank, otherwise shared; see shared.py."""

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

from candle_p1.data import huge_pages
from candle_p1.data.cooperative import read_together
from candle_p1.data.huge_pages import HUGE_BYTES, HugeFile
from candle_p1.data.shared import NodeArray, sharers
from candle_p1.data.table import CsvLayout
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.shared_file import MEMORY, NoRoomError
from tools.simulated import SimulatedJob

NUM_PAGES = 3

needs_collapse = pytest.mark.skipif(
    not huge_pages.are_available() or tuple(map(int, platform.release().split(".")[:2])) < (6, 1),
    reason="the kernel has no huge pages for files in memory on request",
)


def mapping_of(array):
    """Returns what the kernel says about the memory that an array is in."""
    address = array.ctypes.data
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = re.match(r"([0-9a-f]+)-([0-9a-f]+)|", entry).groups()
        if first and int(first, 16) <= address < int(last, 16):
            return entry
    raise AssertionError("the array is in no mapping")


@pytest.fixture(autouse=True)
def no_page_is_slow(monkeypatch):
    """Otherwise, whether there are huge pages depends on time."""
    monkeypatch.setattr(huge_pages, "SLOW_S", math.inf)


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


def flags_of(array):
    return re.search("VmFlags:.*", mapping_of(array))[0]


def test_the_matrix_of_a_single_rank_is_private_and_in_huge_pages(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("1,2,3\n4,5,6\n")
    values = read_together(path, CsvLayout()).values
    assert values.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert sharers(values).size == 1
    assert values.flags.writeable
    mapping = mapping_of(values)
    assert re.match(r"\S+ rw-p \S+ 00:00 0 *\n", mapping), "no file, and nobody else sees it"
    if huge_pages.are_available():
        assert " hg" in flags_of(values)


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
    asked, libc = [], huge_pages._libc()

    def refuse(*_):
        asked.append(huge_pages.ctypes.set_errno(errno.EINVAL))
        return -1

    fake = SimpleNamespace(mmap=libc.mmap, munmap=libc.munmap, madvise=refuse)
    monkeypatch.setattr(huge_pages, "_libc", lambda: fake)
    monkeypatch.setattr(huge_pages, "are_available", lambda: True)
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

    monkeypatch.setattr(huge_pages, "are_available", lambda: True)
    monkeypatch.setattr(huge_pages.os, "posix_fallocate", refuse)
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
@needs_collapse
def test_no_more_huge_pages_are_asked_for_once_one_was_slow(monkeypatch, file, slow_s):
    monkeypatch.setattr(huge_pages, "SLOW_S", slow_s)
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
