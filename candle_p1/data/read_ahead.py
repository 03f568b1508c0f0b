"""Reading the blocks of a rank, each while those before it are being used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from candle_p1.data.source import Source, unreadable
from candle_p1.data.stream import TextStream
from candle_p1.distributed.comm import Communicator
from candle_p1.errors import DataError
from candle_p1.instrument import reading
from candle_p1.scaling import share_bounds

NUM_BUFFERS = 3
"""The block that is being parsed, the next one, and the one that is being read."""


class Block(NamedTuple):
    """A range of a text's bytes.

    Attributes:
        start: The position of its first byte.
        stop: The position after its last byte.
        is_last: Whether the text ends there.
        buffer: The bytes, from index 0 on; what follows them is undefined.
        error: Why they could not be read; the buffer is then undefined.
    """

    start: int
    stop: int
    is_last: bool
    buffer: bytearray
    error: DataError | None = None


class _Pending(NamedTuple):
    block: Block
    reads: list[Future[None]]


class ReadAhead:
    """Reads blocks in order, and always has the next one read while others are in use.

    Reading begins when the object is entered, and does not wait for other ranks. NUM_BUFFERS blocks
    are in memory at most: further ones are read into the memory of those that are given back.

    Args:
        text: The file, or the text in it if it is compressed.
        starts: The first byte of each block; those at the text's end or after it are not read.
        block_bytes: The length of a block.
        num_threads: How many threads read a block of a file together.
    """

    def __init__(
        self, text: Source | TextStream, starts: Iterator[int], block_bytes: int, num_threads: int
    ) -> None:
        self._text, self._starts, self._block_bytes = text, starts, block_bytes
        is_stream = isinstance(text, TextStream)  # which notes by itself what it reads
        self._num_threads = 1 if is_stream else num_threads
        self._log = reading.ReadLog() if is_stream else reading.current()
        self._free: list[bytearray] = []
        self._stopped = False
        self._pending: deque[_Pending] = deque()
        self._pool = ThreadPoolExecutor(self._num_threads, "read")

    def __enter__(self) -> ReadAhead:
        for _ in range(NUM_BUFFERS):
            self._begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._pool.shutdown(cancel_futures=True)

    def take(self) -> Block | None:
        """Waits for the next block and returns it; None if there is none.

        One of those taken must have been given back.
        """
        if not self._pending:
            return None
        block, reads = self._pending.popleft()
        try:
            for read in reads:
                read.result()
        except OSError as error:
            return block._replace(error=unreadable(self._text.path, error))
        except DataError as error:
            return block._replace(error=error)
        end = self._text.end
        if end is None:
            return block
        if end <= block.start:
            return None
        return block._replace(stop=min(end, block.stop), is_last=end <= block.stop)

    def give_back(self, block: Block) -> None:
        """Begins to read another block into the memory of one, which must not be used any more."""
        self._free.append(block.buffer)
        self._begin()

    def stop(self) -> None:
        """Begins no further reads: no further block will be taken."""
        self._stopped = True
        self._text.stop()
        for pending in self._pending:
            for read in pending.reads:
                read.cancel()

    def _begin(self) -> None:
        start, end = next(self._starts), self._text.end
        if self._stopped or (end is not None and start >= end):
            return
        stop = start + self._block_bytes if end is None else min(start + self._block_bytes, end)
        # The only block that is shorter than others is the last one.
        buffer = self._free.pop() if self._free else bytearray(stop - start)
        block, view, num_bytes = Block(start, stop, False, buffer), memoryview(buffer), stop - start

        def read(thread: int) -> None:
            first, last = share_bounds(num_bytes, thread, self._num_threads)
            with self._log.noted(last - first):
                self._text.read(view[first:last], start + first)

        self._pending.append(
            _Pending(block, [self._pool.submit(read, i) for i in range(self._num_threads)])
        )


def agree_on_zero(comm: Communicator) -> None:
    """Tells the active log of reads a moment that is the same on all ranks; collective.

    All ranks leave the barrier at about the same time, and the ranks of a node have the same clock.
    """
    comm.barrier()
    reading.current().zero_s = comm.local.broadcast(time.perf_counter())
