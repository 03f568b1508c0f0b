"""Reading the blocks of a rank, each while those before it are being used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from candle_p1.data.source import Source, unreadable
from candle_p1.distributed.comm import Communicator
from candle_p1.errors import DataError
from candle_p1.instrument import reading
from candle_p1.scaling import share_bounds

NUM_BUFFERS = 3
"""The block that is being parsed, the next one, and the one that is being read."""


class Block(NamedTuple):
    """A range of a file's bytes.

    Attributes:
        start: The position of its first byte.
        stop: The position after its last byte.
        buffer: The bytes, from index 0 on; what follows them is undefined.
        error: Why they could not be read; the buffer is then undefined.
    """

    start: int
    stop: int
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
        source: The file.
        bounds: The first byte of each block, and the one after its last.
        num_threads: How many threads read a block together.
    """

    def __init__(self, source: Source, bounds: Sequence[tuple[int, int]], num_threads: int) -> None:
        self._source, self._num_threads = source, num_threads
        self._left = deque(bounds)
        size = max((stop - start for start, stop in bounds), default=0)
        self._free = [bytearray(size) for _ in bounds[:NUM_BUFFERS]]
        self._pending: deque[_Pending] = deque()
        self._pool = ThreadPoolExecutor(num_threads, "read")
        self._log = reading.current()

    def __enter__(self) -> ReadAhead:
        while self._free and self._left:
            self._begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self) -> Block:
        """Waits for the next block and returns it; one of those taken must have been given back."""
        block, reads = self._pending.popleft()
        try:
            for read in reads:
                read.result()
        except OSError as error:
            block = block._replace(error=unreadable(self._source.path, error))
        except DataError as error:
            block = block._replace(error=error)
        return block

    def give_back(self, block: Block) -> None:
        """Begins to read another block into the memory of one, which must not be used any more."""
        self._free.append(block.buffer)
        if self._left:
            self._begin()

    def stop(self) -> None:
        """Begins no further reads: no further block will be taken."""
        self._left.clear()
        for pending in self._pending:
            for read in pending.reads:
                read.cancel()

    def _begin(self) -> None:
        start, stop = self._left.popleft()
        block = Block(start, stop, self._free.pop())
        view = memoryview(block.buffer)

        def read(thread: int) -> None:
            first, last = share_bounds(stop - start, thread, self._num_threads)
            with self._log.noted(last - first):
                self._source.read(view[first:last], start + first)

        self._pending.append(
            _Pending(block, [self._pool.submit(read, i) for i in range(self._num_threads)])
        )


def agree_on_zero(comm: Communicator) -> None:
    """Tells the active log of reads a moment that is the same on all ranks; collective.

    All ranks leave the barrier at about the same time, and the ranks of a node have the same clock.
    """
    comm.barrier()
    reading.current().zero_s = comm.local.broadcast(time.perf_counter())
