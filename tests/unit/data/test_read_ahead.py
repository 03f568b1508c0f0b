"""Reading ahead, with sources whose reads wait for events; nothing depends on their duration."""

from __future__ import annotations

import errno
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.data.read_ahead import NUM_BUFFERS, ReadAhead
from candle_p1.data.source import Source
from candle_p1.errors import DataError
from candle_p1.instrument import reading

LIMIT_S = 60
"""How long a test waits for an event before it fails."""


class Bytes(Source):
    """A source in memory, which says when a read begins, and waits before it ends."""

    def __init__(self, content):
        super().__init__(Path("table.csv"), -1, len(content), 0)
        self.content = content
        self.begun = {}  # an event for each position
        self.may_end = {}
        self.broken = None  # the position from which on nothing can be read

    def event(self, events, position):
        return events.setdefault(position, threading.Event())

    def read(self, into, start):
        self.event(self.begun, start).set()
        if start in self.may_end:
            assert self.may_end[start].wait(LIMIT_S)
        if self.broken is not None and start >= self.broken:
            raise OSError(errno.EIO, "Input/output error")
        into[:] = self.content[start : start + len(into)]


def taken(source, bounds, num_threads=1):
    with ReadAhead(source, bounds, num_threads) as ahead:
        for start, stop in bounds:
            block = ahead.take()
            assert (block.start, block.stop) == (start, stop)
            yield block
            ahead.give_back(block)


@given(
    content=st.binary(max_size=100),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    num_threads=st.integers(1, 4),
)
def test_blocks_have_the_bytes_of_the_file(content, cuts, num_threads):
    bounds = list(pairwise(sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})))
    blocks = taken(Bytes(content), bounds, num_threads)
    assert b"".join(bytes(b.buffer[: b.stop - b.start]) for b in blocks) == content


def test_the_next_block_is_read_while_two_are_in_use():
    source = Bytes(b"abcdefghij")
    bounds = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    for position in (6, 8):
        source.event(source.may_end, position)
    with ReadAhead(source, bounds, 1) as ahead:
        # Nobody has asked for a block, and the first three are read.
        for position in (0, 2, 4):
            assert source.event(source.begun, position).wait(LIMIT_S)
        first, second = ahead.take(), ahead.take()
        assert (bytes(first.buffer), bytes(second.buffer)) == (b"ab", b"cd")
        # The fourth one is read while the second is in use, and only once the first is not.
        assert not source.event(source.begun, 6).is_set()
        ahead.give_back(first)
        assert source.event(source.begun, 6).wait(LIMIT_S)
        assert (bytes(second.buffer), bytes(ahead.take().buffer)) == (b"cd", b"ef")
        ahead.give_back(second)
        source.may_end[6].set()
        assert bytes(ahead.take().buffer) == b"gh"
        source.may_end[8].set()
        assert bytes(ahead.take().buffer) == b"ij"


def test_no_more_than_three_blocks_are_in_memory():
    bounds = [(i, i + 3) for i in range(0, 30, 3)]
    blocks = taken(Bytes(bytes(30)), bounds)
    assert len({id(block.buffer) for block in blocks}) == NUM_BUFFERS == 3


def test_a_block_that_cannot_be_read_has_an_error():
    source = Bytes(bytes(30))
    source.broken = 9
    with ReadAhead(source, [(i, i + 3) for i in range(0, 30, 3)], 3) as ahead:
        blocks = [ahead.take() for _ in range(3)]
        assert [block.error for block in blocks] == [None] * 3
        ahead.give_back(blocks[0])
        error = ahead.take().error
    assert isinstance(error, DataError)
    assert str(error) == "table.csv: the file cannot be read: Input/output error"


def test_nothing_is_read_after_a_stop():
    source = Bytes(bytes(15))
    for position in (3, 6, 9, 12):
        source.event(source.may_end, position)
    with ReadAhead(source, [(i, i + 3) for i in range(0, 15, 3)], 1) as ahead:
        ahead.give_back(ahead.take())
        assert source.event(source.begun, 3).wait(LIMIT_S)
        ahead.stop()
        source.may_end[3].set()
    assert sorted(source.begun) == [0, 3]


def test_other_errors_are_raised():
    class Wrong(Bytes):
        def read(self, into, start):
            raise ZeroDivisionError

    with (
        ReadAhead(Wrong(b"abc"), [(0, 3)], 1) as ahead,
        pytest.raises(ZeroDivisionError),
    ):
        ahead.take()


def test_every_read_is_logged():
    log = reading.ReadLog()
    with reading.active(log):
        list(taken(Bytes(bytes(30)), [(0, 10), (10, 30)], num_threads=2))
    list(taken(Bytes(bytes(30)), [(0, 10)]))
    assert sorted(read.num_bytes for read in log.reads) == [5, 5, 10, 10]
    assert all(read.begin_s <= read.end_s for read in log.reads)
