"""The text of a compressed file, for all ranks of a node: each byte is decompressed once there.

A compressed file can be decompressed only from its beginning. On each node, a thread of the first
rank does that, ahead of the ranks, and puts the blocks that they parse into memory that the node
shares: NUM_SLOTS blocks for each rank, the next of which waits until its rank has copied the one
before. Nodes decompress the whole file each, which costs them no message.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from typing import Any, NamedTuple

import numpy as np

from candle_p1.data.shared import allocate
from candle_p1.data.source import Source
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.errors import CandleError, DataError
from candle_p1.instrument import reading

NUM_SLOTS = 2
"""The block that a rank copies, and the one that is being decompressed for it."""
POLL_S = 5e-4
ERROR_BYTES = 4096
NUM_READY, END, IS_OVER, NUM_ERROR_BYTES, NUM_COPIED = range(5)
"""Numbers at the beginning of the shared memory: the blocks that are ready; where the text ends, or
-1; whether no further block will be ready; the length of the error's text, which follows all
numbers; and the blocks that each rank has copied."""


class Blocks(NamedTuple):
    """Which blocks of the text the ranks of this node have.

    Attributes:
        first_byte: Where the first block begins.
        num_bytes: The length of a block.
        first_rank: The place of the node's first rank among all, in the order of the blocks.
    """

    first_byte: int
    num_bytes: int
    first_rank: int


class TextStream:
    """The blocks of a compressed file. Creating one is collective; entering begins to decompress.

    Args:
        source: The file.
        comm: The ranks, which take blocks in turn.
        blocks: The blocks of this node.
        notify: Called if there is little shared memory; see `candle_p1.data.shared.allocate`.
        progress: Called on rank 0 with the file's name, the bytes of it that have been read, and
            its size.

    Raises:
        DataError: There is no memory for the blocks; the same on all ranks.
    """

    def __init__(
        self,
        source: Source,
        comm: Communicator,
        blocks: Blocks,
        notify: Callable[[str], None] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.path, self._source, self._comm, self._blocks = source.path, source, comm, blocks
        self._log = reading.current()
        self._progress = progress if comm.rank == 0 else None
        num_numbers = NUM_COPIED + comm.local_size
        num_slots = NUM_SLOTS * comm.local_size
        begin = -(-(8 * num_numbers + ERROR_BYTES) // 4096) * 4096
        size = begin + num_slots * blocks.num_bytes
        self._shared = agree(comm, lambda: allocate((size,), np.uint8, comm.local, notify))
        memory = self._shared.array
        self._numbers = memory[: 8 * num_numbers].view(np.int64)
        self._error = memory[8 * num_numbers :][:ERROR_BYTES]
        self._slots = memory[begin:].reshape(num_slots, blocks.num_bytes)
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
        if self._comm.local_rank == 0 and exception[0] is None:
            self._work.result()

    def stop(self) -> None:
        """Ends the reads of this rank that wait and, on the node's first rank, decompressing."""
        self._stopped.set()

    @property
    def end(self) -> int | None:
        """Where the text ends; None if that is not known yet."""
        end = int(self._numbers[END])
        return end if end >= 0 else None

    def read(self, into: memoryview, start: int) -> None:
        """Copies one of this rank's blocks as soon as it is ready; nothing if there is none.

        Raises:
            DataError: The text cannot be decompressed so far.
        """
        numbers, num_ranks = self._numbers, self._comm.local_size
        turn = (start - self._blocks.first_byte) // self._blocks.num_bytes // self._comm.size
        number = turn * num_ranks + self._comm.local_rank  # among the blocks of this node
        while numbers[NUM_READY] <= number and not (numbers[IS_OVER] or self._stopped.is_set()):
            time.sleep(POLL_S)
        if numbers[NUM_READY] > number:
            into[:] = self._slots[number % len(self._slots)].data[: len(into)]
            numbers[NUM_COPIED + self._comm.local_rank] = turn + 1
        elif numbers[NUM_ERROR_BYTES]:
            text = self._error[: numbers[NUM_ERROR_BYTES]].tobytes().decode(errors="replace")
            raise DataError(text, self.path)

    def _decompress(self) -> None:
        numbers = self._numbers
        try:
            with self._source.text(self._blocks.first_byte, self._log) as text:
                numbers[END] = self._use(text)
                numbers[NUM_READY] += 1  # the last block, which may be empty, or another node's
        except CandleError as error:
            problem = getattr(error, "problem", str(error)).encode()[:ERROR_BYTES]
            self._error[: len(problem)] = np.frombuffer(problem, np.uint8)
            numbers[NUM_ERROR_BYTES] = len(problem)
        finally:
            numbers[IS_OVER] = 1

    def _use(self, text: BufferedReader[Any]) -> int:
        """Puts the blocks of this node where their ranks read them; returns where the text ends.

        The last block is not ready yet when it returns. The text is as if empty after `stop`.
        """
        numbers, (first_byte, num_bytes, first_rank) = self._numbers, self._blocks
        num_ranks, most_bytes = self._comm.local_size, self._source.most_text_bytes
        position, others = first_byte, np.empty(num_bytes, np.uint8)
        for block in itertools.count():
            turn, place = divmod(block, self._comm.size)
            rank, slot = place - first_rank, others
            is_ours = 0 <= rank < num_ranks
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
