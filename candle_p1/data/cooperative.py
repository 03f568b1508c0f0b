"""Reading a table by all ranks of a job together: each byte is read once and parsed once.

The file is divided into blocks of bytes, which go round the ranks in turn: a wave is one block for
each. In every wave a rank

1. reads its block, by several threads;
2. sends the line that its block breaks off to the rank whose block ends that line;
3. counts the lines that end in its block, and learns from the counts before it which rows they are;
4. parses them, by several threads, to these rows of the matrix, of which a node has one
   (candle_p1.data.shared);
5. where there are several nodes, takes part in the exchange of the wave's rows.

So no rank holds more of the file than a block and a line.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from candle_p1.data import _csvkernel as kernel
from candle_p1.data.builder import TableBuilder
from candle_p1.data.source import open_together
from candle_p1.distributed.comm import Attempt, SerialCommunicator
from candle_p1.errors import DataError
from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from candle_p1.data.source import Head, Source
    from candle_p1.data.table import CsvLayout, Table
    from candle_p1.distributed.comm import Communicator

BLOCK_BYTES = 4 << 20
"""What a thread reads and parses at a time: it stays in the processor's cache between the two."""
SMALLEST_BLOCK_BYTES = 1 << 18
MORE_ROWS = 1.03
"""The rows expected, from the first wave, are exceeded by this factor to be on the safe side."""
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
        head = Attempt(lambda: source.read_head(layout) if comm.rank == 0 else None).agree(comm)
        head = comm.broadcast(head)
        assert head is not None
        if block_bytes is None:
            fair = -(-source.num_bytes // (comm.size * num_threads))
            block_bytes = num_threads * min(BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, fair))
        team = _Team(comm, pool, num_threads, notify)
        return _Load(source, layout, head, team, block_bytes).run()


class _Problem(NamedTuple):
    """The first thing wrong in what a rank has parsed."""

    place: int  # of the line's first byte
    num_fields: int
    column: int
    content: bytes


@dataclass
class _Team:
    """The ranks and their threads.

    Attributes:
        order: Ranks in the order of their blocks: those of a node stand together, so that its rows
            of a wave do.
        position: This rank's place in it.
        nodes: The node of each place.
    """

    comm: Communicator
    pool: ThreadPoolExecutor
    num_threads: int
    notify: Callable[[str], None] | None
    order: list[int] = field(init=False)
    position: int = field(init=False)
    nodes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        places = self.comm.allgather((self.comm.node, self.comm.local_rank))
        self.order = sorted(range(self.comm.size), key=lambda rank: places[rank])
        self.position = self.order.index(self.comm.rank)
        self.nodes = [places[rank][0] for rank in self.order]

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value in the order of blocks; collective."""
        everyone = self.comm.allgather(value)
        return [everyone[rank] for rank in self.order]

    def bounds_by_node(self, counts: Sequence[int], first: int) -> list[tuple[int, int]]:
        """Returns each node's first row and the one after its last, by the rows of each block.

        Args:
            counts: Rows, in the order of blocks.
            first: The first row of the first block.
        """
        bounds = []
        for node in range(self.comm.num_nodes):
            block, num_blocks = self.nodes.index(node), self.nodes.count(node)
            last = first + sum(counts[block : block + num_blocks])
            bounds.append((first, last))
            first = last
        return bounds

    def map(self, work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Runs work on the threads; returns the results in order."""
        if self.num_threads == 1:
            return [work(*each) for each in zip(*arguments, strict=True)]
        return list(self.pool.map(work, *arguments))


class _Load:
    """One table, wave by wave."""

    def __init__(
        self, source: Source, layout: CsvLayout, head: Head, team: _Team, block_bytes: int
    ) -> None:
        self._source, self._layout, self._head, self._team = source, layout, head, team
        self._table = TableBuilder(source.path, layout, head, team.comm, team.notify)
        self._kernel = kernel.Layout(self._table.is_text, layout.separator, list(layout.missing))
        self._block_bytes = block_bytes
        self._room = 0  # before the block, for the beginning of its first line
        self._buffer = bytearray()
        self._held = b""  # by the first rank: what the wave before has broken off
        self._num_rows = 0

    def run(self) -> Table:
        """Reads all waves."""
        comm, size = self._team.comm, self._source.num_bytes
        wave_bytes = self._block_bytes * comm.size
        for first in range(self._head.first_byte, size, wave_bytes):
            start = min(first + self._team.position * self._block_bytes, size)
            stop = min(start + self._block_bytes, size)
            self._read_wave(start, stop, num_left=max(size - first - wave_bytes, 0))
        Attempt(self._source.check).agree(comm)
        return self._table.finish(self._num_rows)

    def _read_wave(self, start: int, stop: int, num_left: int) -> None:
        """Reads and parses this rank's block.

        Args:
            start: Its first byte.
            stop: The byte after its last one.
            num_left: Bytes of the file that are left to later waves.
        """
        team = self._team
        Attempt(lambda: self._read_block(start, stop)).agree(team.comm)
        bounds = self._divide(*self._complete_lines(start, stop))
        counts = self._count(bounds)
        everyones = team.gather(sum(counts))
        first_row = self._num_rows + sum(everyones[: team.position])
        self._num_rows += sum(everyones)
        num_read = self._source.num_bytes - num_left - self._head.first_byte
        expected = self._num_rows * (1 + MORE_ROWS * num_left / num_read)
        self._table.reserve(self._num_rows, int(expected))
        rows = [first_row, *(first_row + int(count) for count in np.cumsum(counts))]
        names, problem = self._parse(bounds, rows, first_byte=start - self._room)
        self._raise_first(problem)
        parts = [slice(*part) for part in pairwise(rows)]
        self._table.learn(list(zip(names, parts, strict=True)))
        self._table.share(team.bounds_by_node(everyones, self._num_rows - sum(everyones)))

    def _read_block(self, start: int, stop: int) -> None:
        """Puts the block's bytes into the buffer, behind room for the beginning of a line."""
        needed = self._room + stop - start
        if len(self._buffer) < needed:
            self._buffer = bytearray(needed)
        num_threads = self._team.num_threads
        parts = [share_bounds(stop - start, i, num_threads) for i in range(num_threads)]
        with memoryview(self._buffer)[self._room : needed] as view:
            try:
                self._team.map(
                    lambda part: self._source.read(view[slice(*part)], start + part[0]), parts
                )
            except OSError as error:
                raise DataError(
                    f"cannot read the file: {error.strerror}", self._source.path
                ) from error

    def _complete_lines(self, start: int, stop: int) -> tuple[int, int]:
        """Hands on the line that the block breaks off, and takes the beginning of its first one.

        Returns:
            Where in the buffer the lines that end in this block begin and stop.
        """
        team, first, end = self._team, self._room, self._room + stop - start
        last_line = self._buffer.rfind(b"\n", first, end) + 1 or first
        if start < stop == self._source.num_bytes:
            last_line = end  # the file's last line may lack its end
        fragment = bytes(memoryview(self._buffer)[last_line:end])
        held, self._held = self._held, b""
        if last_line == first:  # no line ends here: what came before goes on too
            fragment, held = held + fragment, b""
        taken = self._pass_on(fragment, ends=last_line > first)
        if team.position == 0:  # what comes round is for the next wave
            self._held, taken = taken, held
        if len(taken) > self._room:
            self._buffer = bytearray(len(taken)) + memoryview(self._buffer)[self._room :]
            last_line += len(taken) - self._room
            self._room = len(taken)
        self._buffer[self._room - len(taken) : self._room] = taken
        return self._room - len(taken), last_line

    def _pass_on(self, fragment: bytes, ends: bool) -> bytes:
        """Sends what this block breaks off to the block that ends it; returns what it gets itself.

        Args:
            fragment: What is broken off.
            ends: Whether a line ends in this block.
        """
        team = self._team
        facts = team.gather((ends, bool(fragment)))
        takers = _takers([ends for ends, _ in facts])
        sources = [
            team.order[position]
            for position, (_, has_fragment) in enumerate(facts)
            if has_fragment and takers[position] == team.position
        ]
        outgoing = {team.order[takers[team.position]]: fragment} if fragment else {}
        received = team.comm.exchange(outgoing, sources)
        return b"".join(received[rank] for rank in sources)

    def _divide(self, begin: int, end: int) -> list[int]:
        """Returns bounds that divide lines of the buffer among the threads."""
        bounds = [begin]
        for i in range(1, self._team.num_threads):
            about = max(bounds[-1], begin + (end - begin) * i // self._team.num_threads)
            bounds.append(self._buffer.find(b"\n", about, end) + 1 or end)
        return [*bounds, end]

    def _count(self, bounds: list[int]) -> list[int]:
        """Returns the rows between bounds in the buffer."""
        text = np.frombuffer(self._buffer, np.uint8)
        return self._team.map(
            lambda start, stop: kernel.count_rows(text, start, stop, self._kernel),
            bounds[:-1],
            bounds[1:],
        )

    def _parse(
        self, bounds: list[int], rows: list[int], first_byte: int
    ) -> tuple[list[list[list[bytes]]], _Problem | None]:
        """Parses what lies between bounds in the buffer.

        Args:
            bounds: In bytes.
            rows: The row of the first line after each bound.
            first_byte: Where in the file the buffer begins.

        Returns:
            The texts that each thread has met, by column of text; and the first problem.
        """
        text, numbers, codes = (
            np.frombuffer(self._buffer, np.uint8),
            self._table.numbers,
            self._table.codes,
        )
        parsed = self._team.map(
            lambda start, stop, row: kernel.parse(
                text, start, stop, self._kernel, numbers, codes, row
            ),
            bounds[:-1],
            bounds[1:],
            rows[:-1],
        )
        problems = [_Problem(first_byte + found[0], *found[1:]) for *_, found in parsed if found]
        return [names for _, names, _ in parsed], min(problems, default=None)

    def _raise_first(self, problem: _Problem | None) -> None:
        """Raises the error of the first line that does not fit, of all ranks'; on every rank."""
        comm = self._team.comm
        problems = [found for found in comm.allgather(problem) if found is not None]
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
        what = "the label" if problem.column == layout.label_column else "the field"
        if not problem.content.strip():
            return DataError(f"{what} is missing", path, line, problem.column + 1)
        shown = problem.content.decode("utf-8", "replace").rstrip("\n")
        if len(shown) > MAX_SHOWN_CHARS:
            shown = shown[:MAX_SHOWN_CHARS] + "…"
        kind = "text" if self._table.is_text[problem.column] else "a finite float32 number"
        return DataError(f"{what} {shown!r} is not {kind}", path, line, problem.column + 1)


def _takers(ends: Sequence[bool]) -> list[int]:
    """Returns, for each block of a wave, which one ends the line it breaks off.

    0 stands for the first block of the next wave.
    """
    takers, next_end = [], 0
    for position in reversed(range(len(ends))):
        takers.append(next_end)
        if ends[position]:
            next_end = position
    return takers[::-1]
