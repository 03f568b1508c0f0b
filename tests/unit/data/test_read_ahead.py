"""Reading ahead, with sources whose reads wait for events; nothing depends on their duration."""

import errno
import threading
from collections import defaultdict
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.data.read_ahead import NUM_BUFFERS, ReadAhead
from candle_p1.data.source import Source
from candle_p1.instrument import reading

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


@given(
    content=st.binary(max_size=100),
    first=st.integers(0, 100),
    size=st.integers(1, 40),
    num_threads=st.integers(1, 4),
)
def test_all_bytes_are_read_once_into_three_buffers(content, first, size, num_threads):
    log, found, buffers = reading.ReadLog(), [], set()
    starts = range(first, len(content), size)
    with (
        reading.active(log),
        ReadAhead(Bytes(content), count(first, size), size, num_threads) as ahead,
    ):
        while block := ahead.take():
            assert block.error is None
            assert block.is_last == (block.stop == len(content))
            found.append((block.start, bytes(block.buffer[: block.stop - block.start])))
            buffers.add(id(block.buffer))
            ahead.give_back(block)
    assert found == [(start, content[start : start + size]) for start in starts]
    assert len(buffers) == min(NUM_BUFFERS, len(starts))
    assert sum(read.num_bytes for read in log.reads) == len(content[first:])
    assert len(log.reads) == num_threads * len(starts)


def test_the_next_block_is_read_while_two_are_in_use():
    source = Bytes(b"abcdefghij")
    source.may_end = {6: threading.Event()}
    with ReadAhead(source, count(0, 2), 2, 1) as ahead:
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
    with ReadAhead(source, count(0, 3), 3, 3) as ahead:
        blocks = [ahead.take() for _ in range(3)]
        assert [block.error for block in blocks] == [None] * 3
        for block in blocks[:2]:
            ahead.give_back(block)
        assert str(ahead.take().error) == "table.csv: the file cannot be read: Input/output error"
        with pytest.raises(ZeroDivisionError):
            ahead.take()
