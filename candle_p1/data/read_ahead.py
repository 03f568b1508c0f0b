"""The blocks of a text that a rank parses: each is read while those before it are being used.

A compressed file can be decompressed only from its beginning. On each node, a thread of the first
rank does that, ahead of the ranks, and puts the blocks that they parse into memory that the node
shares: NUM_SLOTS blocks for each rank, the next of which waits until its rank has copied the one
before. So each byte is decompressed once on a node; nodes decompress the whole file each, which
costs them no message.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.shared import allocate
from candle_p1.data.source import Loading, Source, unreadable
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.errors import CandleError, DataError
from candle_p1.instrument import reading

NUM_SLOTS = 2
"""The block that a rank copies, and the one that is being decompressed for it."""
POLL_S = 5e-4
NUM_READY, END, IS_OVER, NUM_COPIED = range(4)
"""Numbers at the beginning of the shared memory: the blocks that are ready; where the text ends, or
-1; whether no further block will be ready; and the blocks that each rank has copied."""


class TextStream:
    """The blocks of a compressed file. Creating one is collective; entering begins to decompress.

    Args:
        source: The file.
        first_byte: Where the first block begins.
        block_bytes: The length of a block.
        position: The place of this rank among all, which take blocks in turn; the ranks of a node
            follow each other.
        loading: Who reads; its `progress` is called on rank 0.

    Raises:
        DataError: There is no memory for the blocks; the same on all ranks.
    """

    def __init__(
        self, source: Source, first_byte: int, block_bytes: int, position: int, loading: Loading
    ) -> None:
        self.path, self._source, comm = source.path, source, loading.comm
        self._first_byte, self._block_bytes, self._comm = first_byte, block_bytes, comm
        self._first_position = position - comm.local_rank
        self._log = reading.current()
        self._progress = loading.progress if comm.rank == 0 else None
        num_numbers = NUM_COPIED + comm.local_size
        num_slots = NUM_SLOTS * comm.local_size
        begin = -(-8 * num_numbers // 4096) * 4096
        shape = (begin + num_slots * block_bytes,)
        self._shared = agree(comm, lambda: allocate(shape, np.uint8, comm.local, loading.notify))
        memory = self._shared.array
        self._numbers = memory[: 8 * num_numbers].view(np.int64)
        self._slots = memory[begin:].reshape(num_slots, block_bytes)
        if comm.local_rank == 0:
            self._numbers[:] = 0
            self._numbers[END] = -1
        comm.local.barrier()
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, "decompress")

    def __enter__(self) -> TextStream:
        if self._comm.local_rank == 0:
            self._work = self._pool.submit(self._decompress)
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._pool.shutdown()
        self._shared.keep(0)

    def stop(self) -> None:
        """Ends the reads of this rank that wait and, on the node's first rank, decompressing."""
        self._stopped.set()

    @property
    def end(self) -> int | None:
        """Where the text ends; 0 if it cannot be decompressed, None if that is not known yet."""
        is_over, end = self._numbers[IS_OVER], int(self._numbers[END])
        return max(end, 0) if is_over or end >= 0 else None

    def read(self, into: memoryview, start: int) -> None:
        """Copies one of this rank's blocks as soon as it is ready; nothing if there is none."""
        numbers, comm = self._numbers, self._comm
        turn = (start - self._first_byte) // self._block_bytes // comm.size
        number = turn * comm.local_size + comm.local_rank  # among the blocks of this node
        while numbers[NUM_READY] <= number and not (numbers[IS_OVER] or self._stopped.is_set()):
            time.sleep(POLL_S)
        if numbers[NUM_READY] > number:
            into[:] = self._slots[number % len(self._slots)].data[: len(into)]
            numbers[NUM_COPIED + comm.local_rank] = turn + 1

    def error(self) -> CandleError | None:
        """Returns why it cannot be decompressed, if so; collective over the node.

        All of the text must have been taken, or `stop` have been called.
        """
        error = None
        if self._comm.local_rank == 0:
            try:
                self._work.result()
            except CandleError as caught:
                error = caught
        found = self._comm.local.first(error)
        return found[1] if found else None

    def _decompress(self) -> None:
        numbers = self._numbers
        try:
            with self._source.text(self._first_byte, self._log) as text:
                numbers[END] = self._use(text)
                numbers[NUM_READY] += 1  # the last block, which may be empty, or another node's
        finally:
            numbers[IS_OVER] = 1

    def _use(self, text: BufferedReader[Any]) -> int:
        """Puts the blocks of this node where their ranks read them; returns where the text ends.

        The last block is not ready yet when it returns. The text is as if empty after `stop`.
        """
        numbers, most_bytes = self._numbers, self._source.most_text_bytes
        position, others = self._first_byte, np.empty(self._block_bytes, np.uint8)
        for block in itertools.count():
            turn, place = divmod(block, self._comm.size)
            rank, slot = place - self._first_position, others
            is_ours = 0 <= rank < self._comm.local_size
            if is_ours:
                slot = self._slots[numbers[NUM_READY] % len(self._slots)]
                while numbers[NUM_COPIED + rank] <= turn - NUM_SLOTS:
                    if self._stopped.wait(POLL_S):
                        return 0
            if self._stopped.is_set():
                return 0
            position += text.readinto(slot.data)
            if position > most_bytes:
                raise DataError(f"its text is longer than {most_bytes} bytes", self.path)
            if self._progress:
                done = sum(read.num_bytes for read in self._log.reads)
                self._progress(self.path.name, done, self._source.num_bytes)
            if not text.peek(1):
                return position
            numbers[NUM_READY] += is_ours
        raise AssertionError


class Block(NamedTuple):
    """Some bytes of a text.

    Attributes:
        start: The position of the first one in the text.
        buffer: The bytes, from index 0 on.
        size: Their number; what follows them in the buffer is undefined.
        begin: The index after the first line that ends among them; 0 if none does.
        end: The index after the last one.
        num_rows: The number of rows between these two.
        is_last: Whether the text ends there.
    """

    start: int
    buffer: bytearray
    size: int
    begin: int
    end: int
    num_rows: int
    is_last: bool


class ReadAhead:
    """Reads blocks in order, and always has the next ones read while others are in use.

    Reading begins when the object is entered, and does not wait for other ranks. For each thread,
    two blocks are in memory, and one more: further ones are read into the memory of those that are
    given back.

    Args:
        text: The file, or the text in it if it is compressed.
        starts: The first byte of each block; those at the text's end or after it are not read.
        block_bytes: The length of a block.
        num_threads: How many blocks of a file are read at a time.
        count_rows: Returns the number of rows in a range of some bytes.
    """

    def __init__(
        self,
        text: Source | TextStream,
        starts: Iterator[int],
        block_bytes: int,
        num_threads: int,
        count_rows: Callable[[NDArray[np.uint8], int, int], int],
    ) -> None:
        self._text, self._starts, self._block_bytes = text, starts, block_bytes
        self._count_rows, self._num_buffers = count_rows, 2 * num_threads + 1
        is_stream = isinstance(text, TextStream)  # which notes by itself what it reads
        self._log = reading.ReadLog() if is_stream else reading.current()
        self._free: list[bytearray] = []
        self._stopped = False
        self._pending: deque[Future[Block | None]] = deque()
        self._pool = ThreadPoolExecutor(1 if is_stream else num_threads, "read")

    def __enter__(self) -> ReadAhead:
        for _ in range(self._num_buffers):
            self._begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._pool.shutdown(cancel_futures=True)

    def take(self) -> Block | None:
        """Waits for the next block and returns it; None if there is none.

        All blocks but those of the threads and one more must have been given back.

        Raises:
            DataError: It cannot be read.
        """
        return self._pending.popleft().result() if self._pending else None

    def give_back(self, block: Block) -> None:
        """Begins to read another block into the memory of one, which must not be used any more."""
        self._free.append(block.buffer)
        self._begin()

    def stop(self) -> None:
        """Begins no further reads: no further block will be taken."""
        self._stopped = True
        if isinstance(self._text, TextStream):
            self._text.stop()
        for read in self._pending:
            read.cancel()

    def error(self) -> CandleError | None:
        """Returns what is wrong with a compressed text, if anything; collective over the node."""
        return self._text.error() if isinstance(self._text, TextStream) else None

    def _begin(self) -> None:
        start, end = next(self._starts), self._text.end
        if not self._stopped and (end is None or start < end):
            self._pending.append(self._pool.submit(self._read, start))

    def _read(self, start: int) -> Block | None:
        def size() -> int:
            end = self._text.end  # of a compressed text, known at the latest with its last block
            return self._block_bytes if end is None else min(self._block_bytes, end - start)

        buffer = self._free.pop() if self._free else bytearray(self._block_bytes)
        if (most_bytes := size()) <= 0:
            return None
        try:
            with self._log.noted(most_bytes):
                self._text.read(memoryview(buffer)[:most_bytes], start)
        except OSError as error:
            raise unreadable(self._text.path, error) from error
        if (num_bytes := size()) <= 0:
            return None
        is_last = start + num_bytes == self._text.end  # whose last line may have no newline
        end = num_bytes if is_last else buffer.rfind(b"\n", 0, num_bytes) + 1
        begin = buffer.find(b"\n", 0, end) + 1 or end
        num_rows = self._count_rows(np.frombuffer(buffer, np.uint8), begin, end)
        return Block(start, buffer, num_bytes, begin, end, num_rows, is_last)


def agree_on_zero(comm: Communicator) -> None:
    """Tells the active log of reads a moment that is the same on all ranks; collective.

    All ranks leave the barrier at about the same time, and the ranks of a node have the same clock.
    """
    comm.barrier()
    reading.current().zero_s = comm.local.broadcast(time.perf_counter())
