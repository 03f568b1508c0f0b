"""The blocks of plain and of compressed tables, with sources that wait for events, not for time."""

import errno
import sys
import threading
from collections import defaultdict
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.data import read_ahead
from candle_p1.data.cooperative import read_together
from candle_p1.data.read_ahead import ReadAhead, TextStream
from candle_p1.data.source import BLOCK_BYTES, Loading, Source, open_together
from candle_p1.data.table import CsvLayout
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError
from candle_p1.instrument import reading
from tests.unit.data.conftest import compress_gzip, compress_zstd, read_by_job

LIMIT_S = 60
"""How long a test waits for an event before it fails."""


class Bytes(Source):
    """A source in memory, which says when a read begins, and waits before it ends."""

    def __init__(self, content, broken=None):
        super().__init__(Path("table.csv"), -1, len(content), 0)
        self.content, self.broken = content, broken or {}  # errors, by position
        self.begun = defaultdict(threading.Event)  # by position
        self.may_end = {}

    def read(self, into, start):
        self.begun[start].set()
        if start in self.may_end:
            assert self.may_end[start].wait(LIMIT_S)
        if start in self.broken:
            raise self.broken[start]
        into[:] = self.content[start : start + len(into)]


def count_lines(text, start, stop):
    return bytes(text[start:stop]).count(b"\n")


@given(
    content=st.lists(st.sampled_from([b"\n", b"1", b"22"]), max_size=50).map(b"".join),
    first=st.integers(0, 100),
    size=st.integers(1, 40),
    num_threads=st.integers(1, 4),
)
def test_all_bytes_are_read_once_into_few_buffers(content, first, size, num_threads):
    log, found, buffers = reading.ReadLog(), [], set()
    starts = range(first, len(content), size)
    with (
        reading.active(log),
        ReadAhead(Bytes(content), count(first, size), size, num_threads, count_lines) as ahead,
    ):
        while block := ahead.take():
            assert block.is_last == (block.start + block.size == len(content))
            text = bytes(block.buffer[: block.size])
            found.append((block.start, text))
            assert text[: block.begin].count(b"\n") <= 1
            assert block.end == len(text) if block.is_last else b"\n" not in text[block.end :]
            assert block.num_rows == text[block.begin : block.end].count(b"\n")
            buffers.add(id(block.buffer))
            ahead.give_back(block)
    assert found == [(start, content[start : start + size]) for start in starts]
    assert len(buffers) <= min(2 * num_threads + 1, len(starts))
    assert sum(read.num_bytes for read in log.reads) == len(content[first:])
    assert len(log.reads) == len(starts)


def test_the_next_block_is_read_while_two_are_in_use():
    source = Bytes(b"abcdefghij")
    source.may_end = {6: threading.Event()}
    with ReadAhead(source, count(0, 2), 2, 1, count_lines) as ahead:
        # Nobody has asked for a block, and the first three are read.
        assert all(source.begun[position].wait(LIMIT_S) for position in (0, 2, 4))
        first, second = ahead.take(), ahead.take()
        # The fourth one is read while the second is in use, and only once the first is not.
        assert not source.begun[6].is_set()
        ahead.give_back(first)
        assert source.begun[6].wait(LIMIT_S)
        assert (bytes(second.buffer), bytes(ahead.take().buffer)) == (b"cd", b"ef")
        source.may_end[6].set()
        assert bytes(ahead.take().buffer) == b"gh"


def test_a_block_that_cannot_be_read_has_an_error_and_other_errors_are_raised():
    source = Bytes(bytes(30), {9: OSError(errno.EIO, "Input/output error"), 12: ZeroDivisionError})
    with ReadAhead(source, count(0, 3), 3, 3, count_lines) as ahead:
        assert [ahead.take().start for _ in range(3)] == [0, 3, 6]
        with pytest.raises(DataError, match=r"^table.csv: the file cannot be read: Input/output"):
            ahead.take()
        with pytest.raises(ZeroDivisionError):
            ahead.take()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.gz", b"1,2\n", "the file is not compressed by gzip, but its name ends with .gz"),
        ("a.zst", compress_gzip(b"1,2\n"), "the file is not compressed by zstd, but"),
        ("a.gz", compress_gzip(b"1,2\n") + b"3,4\n", "gzip -t"),
        ("a.gz", compress_gzip(b"1,2\n" * 99 + b"1,x"), "line 100, column 2: the field 'x'"),
        ("a.gz", compress_gzip(b"1,2\n" * 99 + b"1"), "the file ends within this line"),
    ],
)
def test_what_cannot_be_read_is_refused_by_all_ranks(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    errors = read_by_job(tmp_path / name, block_bytes=32, num_threads=1)
    assert errors == [errors[0]] * 3
    assert str(tmp_path / name) in errors[0]
    assert problem in errors[0]


def test_a_text_that_grows_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("candle_p1.data.source.MOST_BYTES", 100_000)
    path = tmp_path / "table.csv.gz"
    path.write_bytes(compress_gzip(b"1,2\n" * 30_000))
    with pytest.raises(DataError, match=f"{path}: its text is longer than 100000 bytes"):
        read_together(path, CsvLayout(), Loading(block_bytes=1000))


def test_libraries_that_decompress_may_be_missing(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "isal", None)
    path.write_bytes(compress_gzip(b"1,2\n" * 1000))
    assert read_together(path, CsvLayout()).values.tolist() == [[1, 2]] * 1000
    path.write_bytes(compress_zstd(b"1,2\n"))
    with pytest.raises(DataError, match=r"reading .zst needs pyarrow.*candle-p1\[readers\]"):
        read_together(path, CsvLayout())


def test_no_more_than_the_slots_is_decompressed_ahead(path):
    """A rank that takes no block keeps two in memory, however long the text is."""
    path.write_bytes(compress_gzip(b"1,2\n" * 100_000))
    asked, go_on = [], threading.Event()
    with open_together(path, SerialCommunicator()) as source:
        stream = TextStream(source, 0, 1000, 0, Loading())

        class Waits(threading.Event):
            def wait(self, timeout=None):
                asked.append(int(stream._numbers[read_ahead.NUM_READY]))
                go_on.set()
                return super().wait(timeout)

        stream._stopped = Waits()
        with stream:
            assert go_on.wait(LIMIT_S)
            memory = bytearray(1000)
            for start in range(0, 5000, 1000):
                stream.read(memoryview(memory), start)
                assert bytes(memory) == b"1,2\n" * 250
    assert max(asked) <= 5 + read_ahead.NUM_SLOTS
    assert asked[0] == read_ahead.NUM_SLOTS


def test_progress_and_the_log_tell_what_is_read_of_the_file(tmp_path):
    path = tmp_path / "table.csv.gz"
    numbers = np.random.default_rng(0).random((10_000, 10))
    path.write_bytes(compress_gzip("\n".join(",".join(map(str, row)) for row in numbers).encode()))
    size, shown, log = path.stat().st_size, [], reading.ReadLog()
    assert size > BLOCK_BYTES // 2
    loading = Loading(block_bytes=1 << 20, progress=lambda *facts: shown.append(facts))
    with reading.active(log):
        read_together(path, CsvLayout(), loading)
    assert sum(read.num_bytes for read in log.reads) == size
    assert {(name, total) for name, _, total in shown} == {("table.csv.gz", size)}
    done = [num_bytes for _, num_bytes, _ in shown]
    assert done == sorted(done)
    assert done[-1] == size
