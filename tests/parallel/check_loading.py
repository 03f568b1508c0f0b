"""Reading with several ranks: every layout of ranks on nodes gives what one process gives."""

import errno
import gc
import gzip
import math
import platform
import re
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from harness import shared_directory

from candle_p1.data import cache, shared
from candle_p1.data.cooperative import read_together
from candle_p1.data.loaders import read_table
from candle_p1.data.shared import HugeFile, NodeArray, sharers
from candle_p1.data.source import CacheSettings, Loading, Source
from candle_p1.data.table import CsvLayout
from candle_p1.data.transforms import fill_missing, join_rows, scale_features
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import CandleError
from candle_p1.instrument import reading
from candle_p1.scaling import share_bounds

TEXT_LAYOUT = CsvLayout(header=True, text_columns=("name",), missing=("na",))
NUMBERS = CsvLayout()
ZSTD = partial(pyarrow.compress, codec="zstd", asbytes=True)
LIMIT_S = 120  # for the other ranks


def write_table(directory, num_rows, final_newline=True, name="table.csv"):
    random = np.random.default_rng(num_rows)
    lines = ["name,a,b,c,empty"]
    for _ in range(num_rows):
        a, b = random.normal(size=2)
        # Lines of very different lengths, some longer than a block.
        word = random.choice(["x", "y" * int(random.integers(1, 60)), "z"])
        lines.append(f"{word},{a:.5f},{b:.15e},{random.integers(0, 10)},na")
    path = directory / name
    path.write_text("\n".join(lines) + "\n" * final_newline)
    return path


def table_of(comm, num_rows):
    """Returns the path of a new table, and what one process reads."""
    directory = shared_directory(comm)
    if comm.rank == 0:
        write_table(directory, num_rows)
    comm.barrier()
    return directory / "table.csv", read_together(directory / "table.csv", TEXT_LAYOUT)


def assert_same(table, other, comm):
    assert table.sha256() == other.sha256()
    assert table.values.tobytes() == other.values.tobytes()
    assert sharers(table.values).size == comm.local_size


def every_layout_reads_what_one_process_reads(comm):
    directory = shared_directory(comm)
    for num_rows in (1, 2, 3, 50, 301):
        for final_newline in (True, False):
            if comm.rank == 0:
                write_table(directory, num_rows, final_newline)
            comm.barrier()
            alone = read_together(directory / "table.csv", TEXT_LAYOUT)
            for block_bytes in (5, 64, 1000, None):
                threads = 1 + comm.rank % 2
                loading = Loading(comm=comm, num_threads=threads, block_bytes=block_bytes)
                table = read_together(directory / "table.csv", TEXT_LAYOUT, loading)
                assert_same(table, alone, comm)
            comm.barrier()


def shared_arrays_are_read_only_and_the_same_memory(comm):
    array = NodeArray((4, 3), np.float32, comm.local)
    array.reserve(0, 12)
    if comm.local_rank == 0:
        array.array[:] = 7
    comm.barrier()
    assert (array.array == 7).all()
    comm.barrier()
    kept = array.keep(2)
    assert kept.shape == (2, 3)
    if comm.local_size > 1:
        with pytest.raises(ValueError, match="read-only"):
            kept[0, 0] = 1
    gc.collect()  # earlier checks' errors refer to their arrays
    maps = re.findall("^.*candle_p1-.*$", Path("/proc/self/maps").read_text(), re.M)
    assert bool(maps) == (comm.local_size > 1)
    assert all(line.endswith("(deleted)") for line in maps), maps  # the file has no name any more


def ranks_fill_huge_pages_that_they_share(comm):
    """Shares end within pages, which several ranks ask for at the same time."""
    size = 5 * shared.HUGE_BYTES // 4 + 1000
    array = NodeArray((size,), np.float32, comm.local)
    first, last = share_bounds(size, comm.local_rank, comm.local_size)
    comm.barrier()
    with pytest.MonkeyPatch.context() as patch:
        # Else it would depend on time, and on how long ranks are in each other's way.
        patch.setattr(shared, "SLOW_S", math.inf)
        patch.setattr(shared, "NUM_TRIES", 100_000)
        filled = array.fill(first, last)
    array.reserve(first, last)
    array.array[first:last] = np.arange(first, last)
    comm.barrier()
    since_6_1 = tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)
    assert filled == (comm.local_size == 1 or (shared.are_available() and since_6_1))
    np.testing.assert_array_equal(array.array, np.arange(size, dtype=np.float32))
    if filled and comm.local_size > 1:
        pages = re.findall(r"^ShmemPmdMapped: *(\d+)", Path("/proc/self/smaps").read_text(), re.M)
        assert sum(map(int, pages)) << 10 == 6 * shared.HUGE_BYTES
    comm.barrier()
    assert len(array.keep(size - 1)) == size - 1


def large_tables_are_the_same_with_and_without_huge_pages(comm):
    directory = shared_directory(comm)
    path = directory / "large.csv"
    if comm.rank == 0:
        numbers = np.random.default_rng(1).integers(0, 100, (1500, 600))
        path.write_text("\n".join(",".join(map(str, row)) for row in numbers))
    comm.barrier()
    alone = read_together(path, NUMBERS)
    fill, filled = HugeFile.fill, []

    def note(self, first, last):
        filled.append(fill(self, first, last))
        return filled[-1]

    for replacement in (note, lambda *_: False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HugeFile, "fill", replacement)
            table = read_together(path, NUMBERS, Loading(comm=comm, block_bytes=500_000))
        assert_same(table, alone, comm)
        comm.barrier()
    assert bool(filled) == (comm.local_size > 1)


def watched(before_read):
    """Returns what reads a file, and first calls a function with the position of every read."""

    class Watched(Source):
        def read(self, into, start):
            before_read(start)
            super().read(into, start)

    return Watched


def ranks_that_open_different_copies_refuse_them(comm):
    """The files have equal sizes; on one rank one byte differs, which is in no sample or in one."""
    path = shared_directory(comm) / f"copy-{comm.rank}.csv"
    content = b"1,2\n" * 500_000
    problem = rf"copy-.*other content on rank {comm.size - 1} than on rank 0"
    for method in ("parallel", "cached"):
        loading = Loading(method, comm, cache=CacheSettings(path.parent / method))
        path.write_bytes(content)
        assert read_table(path, loading, NUMBERS).values.sum() == 1_500_000
        for place in (100_000, 0):
            if comm.rank == comm.size - 1:
                path.write_bytes(content[:place] + b"3" + content[place + 1 :])
            with pytest.raises(CandleError, match=problem):
                read_table(path, loading, NUMBERS)


def compressed_tables_are_what_their_text_is_and_damaged_ones_are_refused(comm):
    path, alone = table_of(comm, 301)
    text = path.read_bytes()
    for suffix, pack in ((".gz", gzip.compress), (".zst", ZSTD)):
        packed = path.with_suffix(suffix)
        damaged = path.with_name(f"damaged{suffix}")
        if comm.rank == 0:
            parts = (text[first : first + 5000] for first in range(0, len(text), 5000))
            packed.write_bytes(b"".join(map(pack, [b"", *parts])))
            damaged.write_bytes(packed.read_bytes()[:-5])
        comm.barrier()
        for block_bytes in (64, 1000, None):
            loading = Loading(comm=comm, num_threads=1 + comm.rank % 2, block_bytes=block_bytes)
            assert_same(read_together(packed, TEXT_LAYOUT, loading), alone, comm)
            with pytest.raises(CandleError, match=rf"{damaged}: the file is damaged or was copied"):
                read_together(damaged, TEXT_LAYOUT, loading)
        cached = Loading("cached", comm, cache=CacheSettings(path.parent / "cache"))
        for _ in range(2):
            assert_same(read_table(packed, cached, TEXT_LAYOUT), alone, comm)
        comm.barrier()


def all_ranks_read_at_the_same_time(comm):
    """No rank's first read ends before the first reads of all ranks have begun."""
    path, alone = table_of(comm, 100)

    def wait_for_all(start):
        (path.parent / f"begun-{comm.rank}").touch()
        limit_s = time.monotonic() + LIMIT_S
        while len(list(path.parent.glob("begun-*"))) < comm.size:
            assert time.monotonic() < limit_s, f"the others do not read while {start} is read"
            time.sleep(0.01)

    loading = Loading(comm=comm, block_bytes=500, source=watched(wait_for_all))
    assert_same(read_together(path, TEXT_LAYOUT, loading), alone, comm)


def an_unreadable_block_of_one_rank_ends_the_load(comm):
    directory = shared_directory(comm)
    if comm.rank == 0:
        (directory / "table.csv").write_text("1,2\n" * 1000)
    comm.barrier()
    blocks = []

    def fail_on_last(start):
        blocks.append(start // 40)
        if comm.rank == comm.size - 1 and len(blocks) == 2:
            raise OSError(errno.EIO, "Input/output error")

    problem = rf"^rank {comm.size - 1}: .*/table\.csv: the file cannot be read: Input/output error$"
    loading = Loading(comm=comm, block_bytes=40, source=watched(fail_on_last))
    with pytest.raises(CandleError, match=problem):
        read_together(directory / "table.csv", NUMBERS, loading)
    assert 2 <= len(blocks) <= 5  # of 100: the ranks hear of it at their third at the latest


def shared_transforms_equal_those_of_one_process(comm):
    directory = shared_directory(comm)
    if comm.rank == 0:
        write_table(directory, 97)
        write_table(directory, 13, name="other.csv")
    comm.barrier()
    for scaling in ("maxabs", "minmax", "std"):
        results = []
        for ranks in (SerialCommunicator(), comm):
            tables = [
                read_together(directory / name, TEXT_LAYOUT, Loading(comm=ranks)).values
                for name in ("table.csv", "other.csv")
            ]
            filled = [fill_missing(table) for table in tables]
            assert [table.shape for table in filled] == [(97, 3), (13, 3)]
            scale_features(scaling, *filled, fit_to=[filled[0][:50]])
            rows = np.arange(40, dtype=np.int64) % 13 - 1
            joined = join_rows((filled[0], rows + 5), (filled[1], rows))
            if ranks is comm:
                assert sharers(joined).size == comm.local_size
            results.append([*filled, joined])
        for alone, together in zip(*results, strict=True):
            assert np.ascontiguousarray(alone).tobytes() == np.ascontiguousarray(together).tobytes()


def a_damaged_cache_is_made_again_by_all(comm):
    path, alone = table_of(comm, 200)
    notes, settings = [], CacheSettings(path.parent / "cache")
    loading = Loading("cached", comm, cache=settings, notify=notes.append)
    assert_same(read_table(path, loading, TEXT_LAYOUT), alone, comm)
    (cached,) = (path.parent / "cache").glob("*.table")
    comm.barrier()
    if comm.rank == comm.size - 1:
        cached.write_bytes(b"x" + cached.read_bytes()[1:])
    comm.barrier()
    assert_same(read_table(path, loading, TEXT_LAYOUT), alone, comm)
    assert len(notes) == (comm.rank == 0)


def a_cache_is_read_once_per_job(comm):
    path, alone = table_of(comm, 301)
    directory = path.parent
    num_bytes = alone.values.nbytes + alone.text["name"].codes.nbytes

    def read(stage=None):
        """Returns the bytes that each rank has read from files."""
        settings = CacheSettings(directory / "cache", stage_directory=stage)
        log, notes = reading.ReadLog(), []
        with reading.active(log):
            loading = Loading("cached", comm, 2, settings, notes.append)
            assert_same(read_table(path, loading, TEXT_LAYOUT), alone, comm)
        assert notes == []
        return comm.allgather(sum(read.num_bytes for read in log.reads))

    for unit_bytes in (1 << 20, 500):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache, "SLAB_BYTES", unit_bytes)  # a small table has many
            if comm.rank == 0:
                for old in (directory / "cache").glob("*.table"):
                    old.unlink()
            comm.barrier()
            read()
            (cached,) = (directory / "cache").glob("*.table")
            of_ranks = read()
            assert sum(of_ranks) == num_bytes
            num_readers = 1 if unit_bytes > 500 else comm.size
            assert sum(map(bool, of_ranks)) == num_readers
            # Once for all nodes together, and then by each from its own copy.
            stage = directory / f"node-{comm.node}-{unit_bytes}"
            for num_readers in (1, comm.num_nodes):
                assert sum(read(stage)) == num_readers * num_bytes
            (copy,) = stage.glob("*.table")
            assert copy.read_bytes() == cached.read_bytes()
            comm.barrier()
            # A node that has lost its copy gets another one; the others keep theirs.
            before = copy.stat().st_ino
            comm.barrier()
            if comm.node == comm.num_nodes - 1 and comm.local_rank == 0:
                copy.rename(directory / "kept")
            comm.barrier()
            read(stage)
            assert (copy.stat().st_ino == before) == (comm.node < comm.num_nodes - 1)
            # All nodes may be given the same directory.
            read(directory / f"same-{unit_bytes}")
        comm.barrier()


CHECKS = (
    every_layout_reads_what_one_process_reads,
    shared_arrays_are_read_only_and_the_same_memory,
    ranks_fill_huge_pages_that_they_share,
    large_tables_are_the_same_with_and_without_huge_pages,
    ranks_that_open_different_copies_refuse_them,
    compressed_tables_are_what_their_text_is_and_damaged_ones_are_refused,
    all_ranks_read_at_the_same_time,
    an_unreadable_block_of_one_rank_ends_the_load,
    shared_transforms_equal_those_of_one_process,
    a_damaged_cache_is_made_again_by_all,
    a_cache_is_read_once_per_job,
)
