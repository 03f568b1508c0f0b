"""Reading a table with all ranks of a job together: each byte is read once and parsed once.

The file is divided into blocks of bytes, which are dealt to the ranks in turn. Every rank begins at
once to read its first blocks, with several threads, and from then on always has the next one read
while it uses one (candle_p1.data.read_ahead). For each of its blocks, a rank

1. waits until its own bytes are there, and counts the lines that end among them;
2. receives from the rank with the previous block the number of rows that end before this block, and
   whether a line continues into it, and tells the rank with the next block the same;
3. has the lines parsed, by several threads, into their rows of the matrix, of which each node has
   one (candle_p1.data.shared);
4. receives the beginning of its first line, if that is in the previous block, and has it parsed;
5. waits until its block before is parsed, and the next rank has the rest of that block's last line,
   while the threads go on with this one.

So ranks read at the same time, because nothing that a rank receives is needed for reading, and they
parse at the same time, because what a rank waits for in step 2 is sent before the other rank
parses. Threads that parse need not wait for each other between blocks, and ranks can be a round of
blocks apart. No rank holds more of the file than three blocks and two lines. If there are several
nodes, they gather each other's rows at the end, in place.

A rank that fails says so in step 2 of its next block, as that with the last block does, and the
ranks after it take no further block. How many blocks there are need not be known for that: the text
of a compressed file is decompressed on each node, ahead of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.data import _csvkernel as kernel
from candle_p1.data.builder import Names, Place, TableBuilder
from candle_p1.data.read_ahead import Block, ReadAhead, TextStream, agree_on_zero
from candle_p1.data.shared import try_directories
from candle_p1.data.source import Loading, Source, is_blank, open_together
from candle_p1.data.table import CsvLayout, Table, wrong_line
from candle_p1.distributed.comm import Communicator, agree, on_first_rank
from candle_p1.distributed.shared_file import NoRoomError, agree_on_room
from candle_p1.errors import DataError
from candle_p1.instrument.phases import region

# The number of rows, the distinct values of each column of text, and what is wrong: where the
# line begins, its number of fields, the column and the content of its first wrong field.
Parsed = tuple[int, Names, tuple[int, int, int, bytes] | None]

BLOCK_BYTES = 4 << 20
"""How much a thread reads and then parses; a rank has room for three times as much for each."""
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
    comm, num_threads, block_bytes = loading.comm, loading.num_threads, loading.block_bytes
    with _Threads(num_threads) as threads:
        head = on_first_rank(comm, source.read_head, layout)
        if block_bytes is None:
            fair = -(-source.num_bytes // (comm.size * num_threads))
            block_bytes = num_threads * min(BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, fair))
        ring = _Ring.of(comm)
        starts = head.first_byte + ring.position * block_bytes, comm.size * block_bytes
        agree_on_zero(comm)

        def load(directory: Path) -> Table:
            with ExitStack() as stack:
                text: Source | TextStream = source
                if source.compression:
                    of_rank = head.first_byte, block_bytes, ring.position
                    text = stack.enter_context(TextStream(source, *of_rank, loading))
                ahead = ReadAhead(text, count(*starts), block_bytes, num_threads)
                stack.enter_context(ahead)
                table = TableBuilder(source, layout, head, comm, directory)
                try:
                    return _Load(comm, ring, threads, ahead, table).run()
                except DataError:  # of all ranks, none of which writes any more
                    table.give_back()
                    raise

        read: Table = try_directories(load, comm, loading.notify)
        return read


class _Threads:
    """The threads of a rank: while some still parse a block, others count the rows of the next."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._counting = ThreadPoolExecutor(num, "count")
        self._parsing = ThreadPoolExecutor(num, "parse")

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *exception: object) -> None:
        self._counting.shutdown()
        self._parsing.shutdown(cancel_futures=True)

    def count(self, work: Callable[[int, int], int], bounds: Sequence[int]) -> list[int]:
        """Returns what `work` finds between bounds, in order."""
        if self.num == 1:
            return [work(*each) for each in pairwise(bounds)]
        return list(self._counting.map(work, bounds[:-1], bounds[1:]))

    def parse(self, work: Callable[[], Parsed]) -> Future[Parsed]:
        """Has a part of a block parsed after those that were handed over before it."""
        if self.num > 1:
            return self._parsing.submit(work)
        # A second thread would compete with this one, which waits for messages by looking for them.
        done: Future[Parsed] = Future()
        done.set_result(work())
        return done


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


class _Lines(NamedTuple):
    """The bytes of a block, as far as they are known without those before it; not copies."""

    text: NDArray[np.uint8]
    first: memoryview  # up to the end of the first line that ends here; empty if none does
    bounds: list[int]  # which divide the other lines that end here among the threads
    counts: list[int]  # of rows between bounds
    rest: memoryview  # of the line that continues in the next block


class _ParsedPart(NamedTuple):
    rows: slice  # of the table
    first_byte: int  # of the text, in the file
    parsed: Future[Parsed]


class _Parsing(NamedTuple):
    block: Block
    line: memoryview  # the first one
    place: Place
    parts: list[_ParsedPart]
    is_sent: Callable[[], None]  # waits until the next rank has the rest of the last line


class _Problem(NamedTuple):
    position: int  # of the line's first byte
    num_fields: int
    column: int
    content: bytes


class _Load:
    def __init__(
        self,
        comm: Communicator,
        ring: _Ring,
        threads: _Threads,
        ahead: ReadAhead,
        table: TableBuilder,
    ) -> None:
        self._comm, self._ring, self._threads, self._ahead = comm, ring, threads, ahead
        self._table, self._source, self._layout = table, table.source, table.layout
        self._kernel = kernel.Layout(
            table.is_text, self._layout.separator, list(self._layout.missing)
        )
        self._counts: list[int] = []  # rows of each of this rank's blocks
        self._failed = False  # on this rank, or before a block of it
        self._error: DataError | None = None
        self._problem: _Problem | None = None
        self._parsing: _Parsing | None = None  # the last block of this rank, if it has lines
        self._free_lines: list[Any] = []  # memory for first lines, as malloc would map it anew

    def run(self) -> Table:
        """Returns the table; collective."""
        comm, is_first = self._comm, self._ring.position == 0
        while self._take_block(is_first=is_first):
            is_first = False
        self._finish_block()
        with region("communicate"):
            agree(comm, self._check)
            agree_on_room(comm, self._raise_no_room)
            problems = comm.gather_any(self._problem)
            if problems is not None:
                found = [problem for problem in problems if problem is not None]
                raise on_first_rank(comm, lambda: self._describe(min(found)))
            self._table.sort_names()
            if comm.num_nodes > 1:
                for bounds_of_nodes in self._bounds_of_rounds():
                    self._table.share(bounds_of_nodes)
            num_rows = int(comm.allreduce_sum(np.array([sum(self._counts)], np.int64))[0])
            if num_rows == 0:
                raise DataError("the file has no rows", self._source.path)
            return self._table.finish(num_rows)

    def _take_block(self, *, is_first: bool) -> bool:
        """Reads the next block, if there is one, and has it parsed; returns whether to go on.

        After an error, and after the last block, every other rank is told, in the order of blocks,
        because it waits for a message.
        """
        block, lines = None, None
        if not self._failed:
            with region("read"):
                block = self._ahead.take()
            if block is not None and block.error is None:
                lines = self._count(block)
            elif block is not None:
                self._error, self._failed = block.error, True
        before = _Before()
        if not is_first:
            with region("wait"):
                before = self._comm.receive(self._ring.before)
        if self._failed or before.num_ended or block is None or lines is None:
            self._ahead.stop()
            self._receive_line(before, EMPTY)
            self._end(before.num_ended)
            return False
        self._use_block(block, lines, before)
        if block.is_last:
            self._end(0)
        return not block.is_last

    def _end(self, num_ended: int) -> None:
        """Tells the next rank, unless it knows, that it takes no further block."""
        if num_ended + 1 < self._comm.size:
            with region("wait"):
                self._comm.send(_Before(num_ended=num_ended + 1), self._ring.after)

    def _count(self, block: Block) -> _Lines:
        buffer, size = block.buffer, block.stop - block.start
        end = buffer.rfind(b"\n", 0, size) + 1
        if block.is_last:
            end = size  # the last line may have no newline
        body = buffer.find(b"\n", 0, end) + 1 or end
        text, view = np.frombuffer(buffer, np.uint8), memoryview(buffer)
        with region("parse"):
            bounds = self._divide(buffer, body, end)
            counts = self._threads.count(
                lambda first, last: kernel.count_rows(text, first, last, self._kernel), bounds
            )
        return _Lines(text, view[:body], bounds, counts, view[end:size])

    def _use_block(self, block: Block, lines: _Lines, before: _Before) -> None:
        """Tells the next rank where its rows are, and has those of a block parsed."""
        if not lines.first:  # no line ends here
            rest = self._receive_line(before, lines.rest)
            self._ahead.give_back(block)
            self._counts.append(0)
            self._tell(self._before_next(before.num_rows, rest), rest, block)
            return
        is_ended = before.has_return and bytes(lines.first[:2]) != b"\n"
        ends_blank = not is_ended and is_blank(lines.first, self._layout.separator)
        has_first = not (before.is_blank and ends_blank)
        row = before.num_rows + has_first
        rows = [row, *(row + int(count) for count in np.cumsum(lines.counts))]
        self._counts.append(rows[-1] - before.num_rows)
        is_sent = self._tell(self._before_next(rows[-1], lines.rest), lines.rest, block)
        place = self._table.place(before.num_rows, rows[-1])
        parts = [
            self._parse(lines.text, bounds, slice(*bounds_of_rows), place, block.start)
            for bounds, bounds_of_rows in zip(pairwise(lines.bounds), pairwise(rows), strict=True)
        ]
        line = self._receive_line(before, lines.first)
        if has_first:
            text, first_byte = np.frombuffer(line, np.uint8), block.start - before.num_bytes
            parts.append(self._parse(text, (0, len(line)), slice(row - 1, row), place, first_byte))
        self._finish_block()
        self._parsing = _Parsing(block, line, place, parts, is_sent)

    def _parse(
        self,
        text: NDArray[np.uint8],
        bounds: tuple[int, int],
        rows: slice,
        place: Place,
        first_byte: int,
    ) -> _ParsedPart:
        """Has the lines between two bounds of a text parsed to some rows of a place.

        `first_byte` is where in the file the text begins.
        """

        def work() -> Parsed:
            first_row = rows.start - place.offset
            found: Parsed = kernel.parse(
                text, *bounds, self._kernel, place.numbers, place.codes, first_row
            )
            return found

        with region("parse"):
            return _ParsedPart(rows, first_byte, self._threads.parse(work))

    def _finish_block(self) -> None:
        """Waits until the last block is parsed, if there is one, and puts its rows in the table."""
        if self._parsing is None:
            return
        (block, line, place, parts, is_sent), self._parsing = self._parsing, None
        with region("parse"):
            parsed = [each.parsed.result() for each in parts]
        with region("wait"):
            is_sent()
        self._free_lines.append(line.obj)
        self._ahead.give_back(block)
        problems = [
            _Problem(each.first_byte + found[0], *found[1:])
            for each, (*_, found) in zip(parts, parsed, strict=True)
            if found
        ]
        if problems:
            self._problem = min([*problems, *filter(None, [self._problem])])
        elif self._error is None:
            with region("parse"):
                for each, (_, names, _) in zip(parts, parsed, strict=True):
                    self._table.learn(names, each.rows)
                try:
                    self._table.put(place)
                except NoRoomError as error:
                    self._error = error
        self._failed = self._failed or self._error is not None or self._problem is not None

    def _before_next(self, num_rows: int, rest: memoryview) -> _Before:
        has_return = len(rest) > 0 and rest[-1] == ord("\r")
        return _Before(num_rows, len(rest), is_blank(rest, self._layout.separator), has_return)

    def _tell(self, before: _Before, rest: memoryview, block: Block) -> Callable[[], None]:
        """Sends the rank with the next block, if any, what it must know, and the broken line.

        Returns what waits until this line may change.
        """
        after = self._ring.after
        if not block.is_last:
            with region("wait"):
                self._comm.send(before, after)
                if rest:
                    return self._comm.send_bytes(rest, after)
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

    def _divide(self, buffer: bytearray, begin: int, end: int) -> list[int]:
        bounds = [begin]
        for i in range(1, self._threads.num):
            about = max(bounds[-1], begin + (end - begin) * i // self._threads.num)
            bounds.append(buffer.find(b"\n", about, end) + 1 or end)
        return [*bounds, end]

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
