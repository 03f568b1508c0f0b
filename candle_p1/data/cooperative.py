"""Reading a table with all ranks of a job together: each byte is read once and parsed once.

The file is divided into blocks of bytes, which are dealt to the ranks in turn. The threads of every
rank begin at once to read its first blocks, and from then on always have the next ones read while
others are in use (candle_p1.data.read_ahead). For each of its blocks, a rank

1. waits until its bytes are there, and the lines that end among them are counted;
2. receives from the rank with the previous block the number of rows that end before this block, and
   whether a line continues into it, and tells the rank with the next block the same;
3. receives the beginning of its first line, if that is in the previous block, and has a thread
   parse the lines into their rows of the matrix, of which each node has one
   (candle_p1.data.shared);
4. if all its threads have blocks to parse, waits until the oldest one is parsed, and the next rank
   has the rest of that block's last line.

So ranks read at the same time, because nothing that a rank receives is needed for reading, and they
parse at the same time, because what a rank waits for in step 2 is sent before the other rank
parses. Ranks can be a round of blocks apart. No rank holds more of the file than two blocks for
each thread, one block more, and their first lines. If there are several nodes, they gather each
other's rows at the end, in place.

A rank that fails says so in step 2 of its next block, as that with the last block does, and the
ranks after it take no further block. How many blocks there are need not be known for that: the text
of a compressed file is decompressed on each node, ahead of its ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.data import _csvkernel as kernel
from candle_p1.data.builder import Names, TableBuilder
from candle_p1.data.read_ahead import Block, ReadAhead, TextStream, agree_on_zero
from candle_p1.data.shared import try_directories
from candle_p1.data.source import Loading, Source, is_blank, open_together
from candle_p1.data.table import CsvLayout, Table, wrong_line
from candle_p1.distributed.comm import Communicator, agree, on_first_rank
from candle_p1.distributed.shared_file import NoRoomError, agree_on_room
from candle_p1.errors import CandleError, DataError
from candle_p1.instrument.phases import region

BLOCK_BYTES = 4 << 20
"""How much a thread reads and then parses."""
SMALLEST_BLOCK_BYTES = 1 << 18
EMPTY = memoryview(b"")


def read_together(path: Path, layout: CsvLayout, loading: Loading | None = None) -> Table:
    """Returns a table, which the ranks of a node share; collective over the ranks of `loading`.

    By default, this process reads alone.

    Raises:
        DataError: The file cannot be read or does not match the layout; the same on all ranks.
    """
    loading = loading or Loading()
    with open_together(path, loading.comm, loading.source) as source:
        return read_opened(source, layout, loading)


def read_opened(source: Source, layout: CsvLayout, loading: Loading) -> Table:
    """Returns the table in a file that all ranks have opened; see `read_together`."""
    comm, num_threads = loading.comm, loading.num_threads
    fair = -(-source.num_bytes // (comm.size * num_threads))
    usual_bytes = min(BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, fair))
    head, block_bytes = on_first_rank(
        comm, lambda: (source.read_head(layout), loading.block_bytes or usual_bytes)
    )
    ring = _Ring.of(comm)
    starts = head.first_byte + ring.position * block_bytes, comm.size * block_bytes
    lines = kernel.Layout(head.is_text(layout), layout.separator, list(layout.missing))
    agree_on_zero(comm)

    def count_rows(text: NDArray[np.uint8], start: int, stop: int) -> int:
        return kernel.count_rows(text, start, stop, lines)

    def load(directory: Path) -> Table:
        with ExitStack() as stack:
            text: Source | TextStream = source
            if source.compression:
                of_rank = head.first_byte, block_bytes, ring.position
                text = stack.enter_context(TextStream(source, *of_rank, loading))
            ahead = ReadAhead(text, count(*starts), block_bytes, num_threads, count_rows)
            stack.enter_context(ahead)
            table = TableBuilder(source, layout, head, comm, directory)
            pool = stack.enter_context(ThreadPoolExecutor(num_threads, "parse"))
            try:
                return _Load(loading, ring, ahead, table, lines, pool).run()
            except DataError:  # of all ranks, none of which writes any more
                table.give_back()
                raise

    read: Table = try_directories(load, comm, loading.notify)
    return read


class _Ring(NamedTuple):
    """A rank's place in the order in which blocks are dealt.

    The ranks of a node are neighbours, so the rows that a node has from one round are contiguous.
    """

    position: int
    before: int  # the rank that has the previous block
    after: int  # the rank that has the next block

    @classmethod
    def of(cls, comm: Communicator) -> _Ring:
        """Returns this rank's place; collective. Rank 0 tells each rank only what it needs."""
        places = comm.gather((comm.node, comm.local_rank))
        if places is None:
            return cls(*comm.receive(0))
        order = sorted(range(comm.size), key=lambda rank: places[rank])
        for i, rank in enumerate(order):
            ring = cls(i, order[i - 1], order[(i + 1) % comm.size])
            if rank == 0:
                own = ring
            else:
                comm.send(tuple(ring), rank)
        return own


class _Before(NamedTuple):
    """What a rank needs to know about the bytes before its block."""

    num_rows: int = 0  # that end there
    num_bytes: int = 0  # of the line that continues in the block
    is_blank: bool = True  # whether these bytes are only spaces and tabs, if any
    has_return: bool = False  # and end with a carriage return, after which a blank line ends
    # How many ranks take no further block, because this was the last one, or after an error.
    num_ended: int = 0


class _Problem(NamedTuple):
    position: int  # of the line's first byte
    num_fields: int
    column: int
    content: bytes


# The codes of the text of some rows, and what they are indices into; or why there are none.
_Parsed = tuple[NDArray[np.int32], list[tuple[slice, Names]]] | _Problem | NoRoomError


class _Parsing(NamedTuple):
    block: Block
    line: memoryview  # the first one
    row: int  # the first one in the table
    is_sent: Callable[[], None]  # waits until the next rank has the rest of the last line
    parsed: Future[_Parsed]


class _Load:
    def __init__(
        self,
        loading: Loading,
        ring: _Ring,
        ahead: ReadAhead,
        table: TableBuilder,
        lines: kernel.Layout,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._loading, self._comm, self._ring = loading, loading.comm, ring
        self._ahead, self._table, self._lines, self._pool = ahead, table, lines, pool
        self._source, self._layout = table.source, table.layout
        self._counts: list[int] = []  # rows of each of this rank's blocks
        self._error: CandleError | None = None
        self._problem: _Problem | None = None
        self._parsing: deque[_Parsing] = deque()
        self._free_lines: list[Any] = []  # memory for first lines, as malloc would map it anew

    def run(self) -> Table:
        """Returns the table; collective."""
        comm, is_first = self._comm, self._ring.position == 0
        while self._take_block(is_first=is_first):
            is_first = False
        while self._parsing:
            self._finish_block()
        with region("communicate"):
            self._error = self._ahead.error() or self._error
            agree(comm, self._check)
            agree_on_room(comm, self._raise_no_room)
            problems = comm.gather_any(self._problem)
            if problems is not None:
                found = [problem for problem in problems if problem is not None]
                raise on_first_rank(comm, lambda: self._describe(min(found)))
            num_rows = int(comm.allreduce_sum(np.array([sum(self._counts)], np.int64))[0])
            if num_rows == 0:
                raise DataError("the file has no rows", self._source.path)
            self._table.place_text(num_rows, self._loading.notify)
            if comm.num_nodes > 1:
                for bounds_of_nodes in self._bounds_of_rounds():
                    self._table.share(bounds_of_nodes)
            return self._table.finish(num_rows)

    def _take_block(self, *, is_first: bool) -> bool:
        """Reads the next block, if there is one, and has it parsed; returns whether to go on.

        After an error, and after the last block, every other rank is told, in the order of blocks,
        because it waits for a message.
        """
        block, before = None, _Before()
        if self._error is None and self._problem is None:
            try:
                with region("read"):
                    block = self._ahead.take()
            except DataError as error:
                self._error = error
        if not is_first:
            with region("wait"):
                before = self._comm.receive(self._ring.before)
        if block is None or before.num_ended:
            self._ahead.stop()
            self._receive_line(before, EMPTY)
            self._end(before.num_ended)
            return False
        self._use_block(block, before)
        if block.is_last:
            self._end(0)
        return not block.is_last

    def _end(self, num_ended: int) -> None:
        """Tells the next rank, unless it knows, that it takes no further block."""
        if num_ended + 1 < self._comm.size:
            with region("wait"):
                self._comm.send(_Before(num_ended=num_ended + 1), self._ring.after)

    def _use_block(self, block: Block, before: _Before) -> None:
        """Tells the next rank where its rows are, and has those of a block parsed."""
        content, num_threads = memoryview(block.buffer), self._loading.num_threads
        first, rest = content[: block.begin], content[block.end : block.size]
        if not first:  # no line ends here
            rest = self._receive_line(before, rest)
            self._ahead.give_back(block)
            self._counts.append(0)
            self._tell(before.num_rows, rest, block)
            return
        is_ended = before.has_return and bytes(first[:2]) != b"\n"
        ends_blank = not is_ended and is_blank(first, self._layout.separator)
        num_rows = block.num_rows + (not (before.is_blank and ends_blank))
        self._counts.append(num_rows)
        is_sent = self._tell(before.num_rows + num_rows, rest, block)
        line = self._receive_line(before, first)
        work = partial(self._parse, block, line, before.num_rows, num_rows)
        with region("parse"):
            if num_threads > 1:
                parsed = self._pool.submit(work)
            else:  # another thread would compete with this one, which looks for messages in a loop
                parsed = Future[_Parsed]()
                parsed.set_result(work())
        self._parsing.append(_Parsing(block, line, before.num_rows, is_sent, parsed))
        if len(self._parsing) > num_threads:
            self._finish_block()

    def _parse(self, block: Block, line: memoryview, row: int, num_rows: int) -> _Parsed:
        """Parses the first line of a block and its other ones to rows of the table from one on."""
        texts = (
            (line, 0, len(line), block.start + block.begin - len(line)),
            (block.buffer, block.begin, block.end, block.start),
        )
        names, done = [], 0
        try:
            with self._table.rows(row, row + num_rows) as (numbers, codes):
                for text, start, stop, position in texts:
                    array = np.frombuffer(text, np.uint8)
                    num, found, wrong = kernel.parse(
                        array, start, stop, self._lines, numbers, codes, done
                    )
                    if wrong is not None:
                        return _Problem(position + wrong[0], *wrong[1:])
                    names.append((slice(done, done + num), found))
                    done += num
        except NoRoomError as error:
            return error
        return codes, names

    def _finish_block(self) -> None:
        """Waits until the oldest of the blocks is parsed."""
        block, line, row, is_sent, parsed = self._parsing.popleft()
        with region("parse"):
            found = parsed.result()
        with region("wait"):
            is_sent()
        self._free_lines.append(line.obj)
        self._ahead.give_back(block)
        if isinstance(found, NoRoomError):
            self._error = self._error or found
        elif isinstance(found, _Problem):
            self._problem = min(found, self._problem or found)
        else:
            with region("parse"):
                self._table.learn(row, *found)

    def _tell(self, num_rows: int, rest: memoryview, block: Block) -> Callable[[], None]:
        """Sends the rank with the next block, if any, what it must know, and the broken line.

        Returns what waits until this line may change.
        """
        has_return = len(rest) > 0 and rest[-1] == ord("\r")
        is_empty = is_blank(rest, self._layout.separator)
        if not block.is_last:
            with region("wait"):
                before = _Before(num_rows, len(rest), is_empty, has_return)
                self._comm.send(before, self._ring.after)
                if rest:
                    return self._comm.send_bytes(rest, self._ring.after)
        return lambda: None

    def _receive_line(self, before: _Before, following: memoryview) -> memoryview:
        """Returns the part of this block's first line that is in the previous block, and more.

        Args:
            before: What is known about this part.
            following: What comes after it.
        """
        num_bytes = before.num_bytes + len(following)
        memory = self._free_lines.pop() if self._free_lines else bytearray()
        if len(memory) < num_bytes:
            memory = bytearray(num_bytes)
        line = memoryview(memory)[:num_bytes]
        if before.num_bytes:
            with region("wait"):
                self._comm.receive_bytes(line[: before.num_bytes], self._ring.before)
        line[before.num_bytes :] = following
        return line

    def _check(self) -> None:
        """Raises this rank's error, unless it is a lack of memory."""
        if self._error is not None and not isinstance(self._error, NoRoomError):
            raise self._error
        self._source.check()

    def _raise_no_room(self) -> None:
        if self._error is not None:
            raise self._error

    def _describe(self, problem: _Problem) -> DataError:
        path, (line, has_no_end) = self._source.path, self._source.locate(problem.position)
        error = wrong_line(*problem[1:], self._table.is_text, path, line, self._layout.label_column)
        if error.column is None and has_no_end:
            text = "; the file ends within this line: it may have been copied incompletely"
            return DataError(error.problem + text, path, line)
        return error

    def _bounds_of_rounds(self) -> list[list[tuple[int, int]]]:
        """Returns, for each round and node, its first row and the one after its last; collective.

        All ranks of this node have written their rows when it returns. Only the ranks with
        local_rank 0 get the rows of other nodes, and only these ranks need them.
        """
        comm, num_nodes = self._comm, self._comm.num_nodes
        num_rounds = int(comm.allreduce_max(np.array([len(self._counts)], np.int64))[0])
        mine = np.zeros(num_rounds, np.int64)
        mine[: len(self._counts)] = self._counts
        counts = np.zeros((num_nodes, num_rounds), np.int64)
        counts[comm.node] = comm.local.allreduce_sum(mine)
        of_nodes = [(node * num_rounds, (node + 1) * num_rounds) for node in range(num_nodes)]
        comm.share_between_nodes(counts.reshape(-1), of_nodes)
        rows = [0, *np.cumsum(counts.T).tolist()]
        return [
            [(rows[place], rows[place + 1]) for place in range(first, first + num_nodes)]
            for first in range(0, num_rounds * num_nodes, num_nodes)
        ]
