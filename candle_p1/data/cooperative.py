"""Reading a table by all ranks of a job together: each byte is read once and parsed once.

The file is divided into blocks of bytes, which go round the ranks in turn. Of each of its blocks a
rank

1. reads the bytes, by several threads;
2. learns from the rank that has the block before how many rows end there, and whether it breaks off
   a line;
3. counts the lines that end in the block, and tells the rank that has the next one;
4. parses them, by several threads, to their rows of the matrix, of which a node has one
   (candle_p1.data.shared);
5. gets the beginning of its first line, if the block before has broken it off, and parses that.

What a rank waits for in 2 is known before the other one parses: the ranks parse at once, and none
has to keep step. None holds more of the file than a block and a line. Where there are several
nodes, they exchange their rows in the end, in place.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from candle_p1.data import _csvkernel as kernel
from candle_p1.data.builder import TableBuilder
from candle_p1.data.shared import NoRoomError, agree_on_room, try_directories
from candle_p1.data.source import open_together
from candle_p1.distributed.comm import Attempt, SerialCommunicator, on_first_rank
from candle_p1.errors import DataError
from candle_p1.instrument.phases import part
from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.data.source import Head, Source
    from candle_p1.data.table import CsvLayout, Table
    from candle_p1.distributed.comm import Communicator

BLOCK_BYTES = 4 << 20
"""What a thread reads and parses at a time: it stays in the processor's cache between the two."""
SMALLEST_BLOCK_BYTES = 1 << 18
MAX_SHOWN_CHARS = 40


def read_together(
    path: Path,
    layout: CsvLayout,
    comm: Communicator | None = None,
    *,
    num_threads: int = 1,
    block_bytes: int | None = None,
    notify: Callable[[str], None] | None = None,
) -> Table:
    """Reads a table; collective.

    Args:
        path: The file; the same on all ranks.
        layout: What it looks like.
        comm: The ranks; None is this one alone.
        num_threads: Threads of each rank.
        block_bytes: Bytes of a rank's block; None chooses.
        notify: Is told, on one rank of a node, where its shared memory is short.

    Returns:
        The table, which the ranks of a node share.

    Raises:
        DataError: The file cannot be read or does not fit the layout; the same on all ranks.
    """
    comm = comm or SerialCommunicator()
    with open_together(path, comm) as source, ThreadPoolExecutor(num_threads) as pool:
        head = on_first_rank(lambda: source.read_head(layout), comm)
        if block_bytes is None:
            fair = -(-source.num_bytes // (comm.size * num_threads))
            block_bytes = num_threads * min(BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, fair))
        threads = _Threads(pool, num_threads)
        ring = _Ring(comm)

        def load(directory: Path) -> Table:
            table = TableBuilder(source, layout, head, comm, directory)
            return _Load(source, layout, head, table, ring, threads, block_bytes).run()

        read: Table = try_directories(load, comm, notify)
        return read


class _Threads(NamedTuple):
    """The threads of a rank."""

    pool: ThreadPoolExecutor
    num: int

    def map(self, work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Runs work on the threads; returns the results in order."""
        if self.num == 1:
            return [work(*each) for each in zip(*arguments, strict=True)]
        return list(self.pool.map(work, *arguments))


class _Ring:
    """The ranks in the order in which blocks go round; making one is collective.

    Those of a node stand together, so that its rows of one round do.

    Attributes:
        position: This rank's place.
        nodes: The node of each place.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        places = comm.allgather((comm.node, comm.local_rank))
        order = sorted(range(comm.size), key=lambda rank: places[rank])
        self.position = order.index(comm.rank)
        self.nodes = [places[rank][0] for rank in order]
        self.after = order[(self.position + 1) % comm.size]
        self.before = order[self.position - 1]
        self._order = order

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value in their order; collective."""
        everyone = self.comm.allgather(value)
        return [everyone[rank] for rank in self._order]


class _Begun(NamedTuple):
    """What a block has to know of those before it.

    Attributes:
        num_rows: How many rows end there.
        num_bytes: Of the line that is broken off, these are there.
        is_blank: They are none, or spaces.
    """

    num_rows: int
    num_bytes: int
    is_blank: bool


class _Problem(NamedTuple):
    """The first thing wrong in what a rank has parsed."""

    place: int  # of the line's first byte
    num_fields: int
    column: int
    content: bytes


class _Load:
    """One table, block by block."""

    def __init__(
        self,
        source: Source,
        layout: CsvLayout,
        head: Head,
        table: TableBuilder,
        ring: _Ring,
        threads: _Threads,
        block_bytes: int,
    ) -> None:
        self._source, self._layout, self._head, self._table = source, layout, head, table
        self._ring, self._threads, self._block_bytes = ring, threads, block_bytes
        self._kernel = kernel.Layout(table.is_text, layout.separator, list(layout.missing))
        self._buffer = bytearray(block_bytes)
        self._counts: list[int] = []  # rows of each of this rank's blocks
        self._error: DataError | None = None
        self._problem: _Problem | None = None

    def run(self) -> Table:
        """Reads all blocks.

        A rank that fails goes on to read and count: the others need to know.
        """
        comm, ring = self._ring.comm, self._ring
        starts = range(self._head.first_byte, self._source.num_bytes, self._block_bytes)
        for number in range(ring.position, len(starts), comm.size):
            with part("communicate"):
                begun = comm.receive(ring.before) if number else _Begun(0, 0, True)
            stop = min(starts[number] + self._block_bytes, self._source.num_bytes)
            self._take_block(starts[number], stop, begun)
        with part("communicate"):
            Attempt(self._check).agree(comm)
            agree_on_room(self._raise_no_room, comm)
            self._raise_first()
            self._table.sort_names()
            rounds = self._bounds_of_rounds(len(starts))
            if comm.num_nodes > 1:
                comm.local.barrier()  # all of this node have written theirs
                for bounds in rounds:
                    self._table.share(bounds)
            num_rows = rounds[-1][-1][1] if rounds else 0
            if num_rows == 0:
                raise DataError("the file holds no rows", self._source.path)
            return self._table.finish(num_rows)

    def _take_block(self, start: int, stop: int, begun: _Begun) -> None:
        """Reads and parses the bytes from start to stop."""
        self._read(start, stop)
        size = stop - start
        end = self._buffer.rfind(b"\n", 0, size) + 1
        if stop == self._source.num_bytes:
            end = size  # the file's last line may lack its end
        fragment = bytes(memoryview(self._buffer)[end:size])
        if end == 0:  # no line ends here
            self._counts.append(0)
            self._tell(begun.num_rows, self._receive_fragment(begun) + fragment, stop)
            return
        body = (self._buffer.find(b"\n", 0, end) + 1 or end) if begun.num_bytes else 0
        first_line = bytes(memoryview(self._buffer)[:body])
        has_first = not (begun.is_blank and _is_blank(first_line))
        bounds = self._divide(body, end)
        text = np.frombuffer(self._buffer, np.uint8)
        with part("parse"):
            counts = self._threads.map(
                lambda first, last: kernel.count_rows(text, first, last, self._kernel),
                bounds[:-1],
                bounds[1:],
            )
        row = begun.num_rows + has_first
        rows = [row, *(row + int(count) for count in np.cumsum(counts))]
        self._counts.append(rows[-1] - begun.num_rows)
        self._tell(rows[-1], fragment, stop)
        with part("parse"):
            problems = self._parse(text, bounds, rows, first_byte=start)
        line = np.frombuffer(self._receive_fragment(begun) + first_line, np.uint8)
        if has_first:
            first_byte = start - begun.num_bytes
            problems += self._parse(line, [0, len(line)], [row - 1, row], first_byte)
        self._problem = self._problem or min(problems, default=None)

    def _tell(self, num_rows: int, fragment: bytes, stop: int) -> None:
        """Tells the rank that has the next block, if there is one, and sends it the broken line."""
        if stop == self._source.num_bytes:
            return
        comm, after = self._ring.comm, self._ring.after
        with part("communicate"):
            comm.send(_Begun(num_rows, len(fragment), _is_blank(fragment)), after)
            if fragment:
                comm.send(fragment, after)

    def _receive_fragment(self, begun: _Begun) -> bytes:
        """Returns the beginning of this block's first line."""
        with part("communicate"):
            return self._ring.comm.receive(self._ring.before) if begun.num_bytes else b""

    def _read(self, start: int, stop: int) -> None:
        """Puts a block's bytes into the buffer."""
        parts = [share_bounds(stop - start, i, self._threads.num) for i in range(self._threads.num)]
        view = memoryview(self._buffer)
        try:
            with part("read"):
                self._threads.map(
                    lambda bounds: self._source.read(view[slice(*bounds)], start + bounds[0]), parts
                )
        except OSError as error:
            self._error = DataError(f"cannot read the file: {error.strerror}", self._source.path)
        except DataError as error:
            self._error = error

    def _divide(self, begin: int, end: int) -> list[int]:
        """Returns bounds that divide lines of the buffer among the threads."""
        bounds = [begin]
        for i in range(1, self._threads.num):
            about = max(bounds[-1], begin + (end - begin) * i // self._threads.num)
            bounds.append(self._buffer.find(b"\n", about, end) + 1 or end)
        return [*bounds, end]

    def _parse(
        self, text: NDArray[np.uint8], bounds: list[int], rows: list[int], first_byte: int
    ) -> list[_Problem]:
        """Parses lines to their rows; does nothing after an error in an earlier block.

        Args:
            text: The lines.
            bounds: Where in it each thread's begin and end.
            rows: The row of the first line after each bound.
            first_byte: Where in the file the text begins.

        Returns:
            The first problem that each thread has met, if it has.
        """
        if self._error is not None or self._problem is not None:
            return []
        place = self._table.place(rows[0], rows[-1])
        parsed = self._threads.map(
            lambda first, last, row: kernel.parse(
                text, first, last, self._kernel, place.numbers, place.codes, row - place.offset
            ),
            bounds[:-1],
            bounds[1:],
            rows[:-1],
        )
        problems = [_Problem(first_byte + found[0], *found[1:]) for *_, found in parsed if found]
        if problems:
            return problems
        for (_, names, _), bounds_of_rows in zip(parsed, pairwise(rows), strict=True):
            self._table.learn(place, names, slice(*bounds_of_rows))
        try:
            self._table.put(place)
        except NoRoomError as error:
            self._error = error
        return []

    def _check(self) -> None:
        """Raises this rank's error, unless it is one of room."""
        if self._error is not None and not isinstance(self._error, NoRoomError):
            raise self._error
        self._source.check()

    def _raise_no_room(self) -> None:
        if self._error is not None:
            raise self._error

    def _raise_first(self) -> None:
        """Raises the error of the first line that does not fit, of all ranks'; on every rank."""
        comm = self._ring.comm
        problems = [found for found in comm.allgather(self._problem) if found is not None]
        if problems:
            first = min(problems)
            error = comm.broadcast(self._describe(first) if comm.rank == 0 else None)
            assert error is not None
            raise error

    def _describe(self, problem: _Problem) -> DataError:
        layout, path = self._layout, self._source.path
        line = self._source.line_number(problem.place)
        if problem.num_fields != self._head.num_columns:
            text = f"{problem.num_fields} fields where {self._head.num_columns} are expected"
            if self._source.is_cut(problem.place):
                text += "; the file ends within this line"
            return DataError(text, path, line)
        error = partial(DataError, path=path, line=line, column=problem.column + 1)
        what = "the label" if problem.column == layout.label_column else "the field"
        if not problem.content.strip():
            return error(f"{what} is missing")
        shown = problem.content.decode("utf-8", "replace").rstrip("\n")
        if len(shown) > MAX_SHOWN_CHARS:
            shown = shown[:MAX_SHOWN_CHARS] + "…"
        kind = "text" if self._table.is_text[problem.column] else "a finite float32 number"
        return error(f"{what} {shown!r} is not {kind}")

    def _bounds_of_rounds(self, num_blocks: int) -> list[list[tuple[int, int]]]:
        """Returns, for each round of blocks, first row and the one after the last of each node."""
        counts = self._ring.gather(self._counts)
        nodes, size = self._ring.nodes, self._ring.comm.size
        rounds, row = [], 0
        for number in range(0, num_blocks, size):
            bounds = []
            for node in range(self._ring.comm.num_nodes):
                first = row
                row += sum(
                    of_rank[number // size]
                    for of_rank, its_node in zip(counts, nodes, strict=True)
                    if its_node == node and number // size < len(of_rank)
                )
                bounds.append((first, row))
            rounds.append(bounds)
        return rounds


def _is_blank(text: bytes) -> bool:
    return not text.strip()
