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

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from candle_p1.data import _csvkernel as kernel
from candle_p1.data.head import Head, read_head
from candle_p1.data.shared import NodeArray
from candle_p1.data.table import Table, TextColumn
from candle_p1.distributed.comm import Attempt, SerialCommunicator
from candle_p1.errors import DataError
from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from candle_p1.data.table import CsvLayout
    from candle_p1.distributed.comm import Communicator

    Names = list[list[bytes]]  # of text, for each column of it

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
    with _open(path, comm) as source, ThreadPoolExecutor(num_threads) as pool:
        head = Attempt(lambda: source.read_head(layout) if comm.rank == 0 else None).agree(comm)
        head = comm.broadcast(head)
        assert head is not None
        if block_bytes is None:
            fair = -(-source.num_bytes // (comm.size * num_threads))
            block_bytes = num_threads * min(BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, fair))
        team = _Team(comm, pool, num_threads, notify)
        return _Load(source, layout, head, team, block_bytes).run()


@dataclass
class _Source:
    """An open file, its size as it was at the beginning."""

    path: Path
    file: int
    num_bytes: int
    changed_ns: int
    prefix: bytes = b""  # has been read already

    def read(self, into: memoryview, start: int) -> None:
        """Fills memory with the bytes from a place on."""
        known = self.prefix[start : start + len(into)]
        into[: len(known)] = known
        done = len(known)
        while done < len(into):
            num = os.preadv(self.file, [into[done:]], start + done)
            if num == 0:
                raise self.change()
            done += num

    def read_head(self, layout: CsvLayout) -> Head:
        """Returns what the first line tells; what was read for it is kept."""
        try:
            head, self.prefix = read_head(self.file, self.path, layout)
        except OSError as error:
            raise DataError(f"cannot read the file: {error.strerror}", self.path) from error
        return head

    def check(self) -> None:
        """Raises DataError if the file has been changed since it was opened."""
        status = os.fstat(self.file)
        if (status.st_size, status.st_mtime_ns) != (self.num_bytes, self.changed_ns):
            raise self.change()

    def change(self) -> DataError:
        return DataError("the file was changed while it was read", self.path)

    def line_number(self, place: int) -> int:
        """Returns the number of the line, from 1, that a byte is in."""
        num, block = 1, 1 << 20
        for start in range(0, place, block):
            num += os.pread(self.file, min(block, place - start), start).count(b"\n")
        return num


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

    def map(self, work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Runs work on the threads; returns the results in order."""
        if self.num_threads == 1:
            return [work(*each) for each in zip(*arguments, strict=True)]
        return list(self.pool.map(work, *arguments))


class _Load:
    """One table, wave by wave."""

    def __init__(
        self, source: _Source, layout: CsvLayout, head: Head, team: _Team, block_bytes: int
    ) -> None:
        self._source, self._layout, self._head, self._team = source, layout, head, team
        self._is_text = [name in layout.text_columns for name in head.names]
        self._is_text += [False] * (head.num_columns - len(head.names))
        self._kernel = kernel.Layout(self._is_text, layout.separator, list(layout.missing))
        self._block_bytes = block_bytes
        self._room = 0  # before the block, for the beginning of its first line
        self._buffer = bytearray()
        self._held = b""  # by the first rank: what the wave before has broken off
        num_text = sum(self._is_text)
        self._numbers: NodeArray | None = None
        self._codes: NodeArray | None = None
        self._names: list[dict[bytes, int]] = [{} for _ in range(num_text)]
        self._num_rows = 0

    def run(self) -> Table:
        """Reads all waves."""
        comm, size = self._team.comm, self._source.num_bytes
        wave_bytes = self._block_bytes * comm.size
        for first in range(self._head.first_byte, size, wave_bytes):
            start = min(first + self._team.position * self._block_bytes, size)
            self._read_wave(start, min(start + self._block_bytes, size), first + wave_bytes)
        Attempt(self._source.check).agree(comm)
        if self._num_rows == 0:
            raise DataError("the file holds no rows", self._source.path)
        assert self._numbers is not None
        assert self._codes is not None
        comm.local.barrier()
        values, codes = self._numbers.keep(self._num_rows), self._sort_names()
        names = [name for name in self._head.names if name not in self._layout.text_columns]
        return Table(values, names, codes)

    def _read_wave(self, start: int, stop: int, wave_stop: int) -> None:
        """Reads and parses this rank's block, the bytes from start to stop."""
        team = self._team
        Attempt(lambda: self._read_block(start, stop)).agree(team.comm)
        bounds = self._divide(*self._complete_lines(start, stop))
        counts = self._count(bounds)
        everyones = team.gather(sum(counts))
        before = self._num_rows + sum(everyones[: team.position])
        rows = [before, *(before + np.cumsum(counts))]
        self._make_room(self._num_rows + sum(everyones), wave_stop)
        names, problem = self._parse(bounds, rows, first_byte=start - self._room)
        outcomes = team.gather((problem, self._unknown(names)))
        self._raise_first([problem for problem, _ in outcomes])
        for _, new in outcomes:
            for known, column in zip(self._names, new, strict=True):
                for name in column:
                    known.setdefault(name, len(known))
        self._recode(names, rows)
        self._share(everyones)
        self._num_rows += sum(everyones)

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
    ) -> tuple[list[Names], _Problem | None]:
        """Parses what lies between bounds in the buffer.

        Args:
            bounds: In bytes.
            rows: The row of the first line after each bound.
            first_byte: Where in the file the buffer begins.

        Returns:
            The names that each thread has met, by column of text; and the first problem.
        """
        assert self._numbers is not None
        assert self._codes is not None
        values, codes = self._numbers.array, self._codes.array
        text = np.frombuffer(self._buffer, np.uint8)
        parsed = self._team.map(
            lambda start, stop, row: kernel.parse(
                text, start, stop, self._kernel, values, codes, int(row)
            ),
            bounds[:-1],
            bounds[1:],
            rows[:-1],
        )
        problems = [_Problem(first_byte + found[0], *found[1:]) for *_, found in parsed if found]
        return [names for _, names, _ in parsed], min(problems, default=None)

    def _recode(self, names: list[Names], rows: list[int]) -> None:
        """Turns indices into a thread's names into those into the names of all."""
        assert self._codes is not None
        for local, start, stop in zip(names, rows[:-1], rows[1:], strict=True):
            for codes, known, column in zip(self._codes.array, self._names, local, strict=True):
                places = np.array([known[name] for name in column], np.int32)
                codes[start:stop] = places[codes[start:stop]]

    def _read_block(self, start: int, stop: int) -> None:
        """Puts the block's bytes into the buffer, behind room for the beginning of a line."""
        needed = self._room + stop - start
        if len(self._buffer) < needed:
            self._buffer = bytearray(needed)
        view = memoryview(self._buffer)[self._room : needed]
        parts = [
            share_bounds(len(view), i, self._team.num_threads)
            for i in range(self._team.num_threads)
        ]
        try:
            self._team.map(
                lambda part: self._source.read(view[slice(*part)], start + part[0]), parts
            )
        except OSError as error:
            raise DataError(f"cannot read the file: {error.strerror}", self._source.path) from error
        finally:
            view.release()

    def _complete_lines(self, start: int, stop: int) -> tuple[int, int]:
        """Hands on the line that the block breaks off, and takes the beginning of its first one.

        Returns:
            Where in the buffer the lines that end in this block begin and stop.
        """
        team = self._team
        first, end = self._room, self._room + stop - start
        last_line = self._buffer.rfind(b"\n", first, end) + 1 or first
        if stop == self._source.num_bytes and start < stop:
            last_line = end  # the file's last line may lack its end
        fragment = bytes(memoryview(self._buffer)[last_line:end])
        held = self._held if team.position == 0 else b""
        if last_line == first:  # no line ends here: what came before goes on too
            fragment, held = held + fragment, b""
        if team.position == 0:
            self._held = b""
        facts = team.gather((last_line > first, bool(fragment)))
        takers = _takers([ends for ends, _ in facts])
        outgoing = {team.order[takers[team.position]]: fragment} if fragment else {}
        sources = [
            position
            for position, (_, has) in enumerate(facts)
            if has and takers[position] == team.position
        ]
        received = team.comm.exchange(outgoing, [team.order[position] for position in sources])
        taken = b"".join(received[team.order[position]] for position in sources)
        if team.position == 0:  # what comes round is for the next wave
            self._held, taken = taken, held
        if len(taken) > self._room:
            self._buffer = bytearray(len(taken)) + memoryview(self._buffer)[self._room :]
            last_line += len(taken) - self._room
            self._room = len(taken)
        self._buffer[self._room - len(taken) : self._room] = taken
        return self._room - len(taken), last_line

    def _divide(self, begin: int, end: int) -> list[int]:
        """Returns bounds that divide lines of the buffer among the threads."""
        bounds = [begin]
        for i in range(1, self._team.num_threads):
            about = max(bounds[-1], begin + (end - begin) * i // self._team.num_threads)
            bounds.append(self._buffer.find(b"\n", about, end) + 1 or end)
        return [*bounds, end]

    def _make_room(self, num_rows: int, wave_stop: int) -> None:
        """Sees to it that the arrays have room for so many rows."""
        if self._numbers is not None and num_rows <= len(self._numbers.array):
            return
        first_byte = self._head.first_byte
        read = min(wave_stop, self._source.num_bytes) - first_byte
        left = self._source.num_bytes - first_byte - read
        room = num_rows + -(-int(num_rows * left * MORE_ROWS) // read) + (8 if left else 0)
        num_text = sum(self._is_text)
        numbers, codes = self._numbers, self._codes

        def make() -> tuple[NodeArray, NodeArray]:
            node, notify = self._team.comm.local, self._team.notify
            num_numbers = self._head.num_columns - num_text
            return (
                NodeArray((room, num_numbers), np.float32, node, notify),
                NodeArray((num_text, room), np.int32, node, notify),
            )

        self._numbers, self._codes = Attempt(make).agree(self._team.comm)
        if numbers is None or codes is None:
            return
        if self._team.comm.local_rank == 0:
            self._numbers.array[: self._num_rows] = numbers.array[: self._num_rows]
            self._codes.array[:, : self._num_rows] = codes.array[:, : self._num_rows]
        self._team.comm.local.barrier()
        numbers.keep(0)
        codes.keep(0)

    def _unknown(self, names: list[Names]) -> Names:
        """Returns the names that no wave before has had, for each column of text."""
        return [
            [name for local in names for name in local[c] if name not in known]
            for c, known in enumerate(self._names)
        ]

    def _raise_first(self, problems: list[_Problem | None]) -> None:
        """Raises the error of the first line that does not fit; the same on every rank."""
        found = [problem for problem in problems if problem is not None]
        if found:
            first = min(found)
            comm = self._team.comm
            error = comm.broadcast(self._describe(first) if comm.rank == 0 else None)
            assert error is not None
            raise error

    def _describe(self, problem: _Problem) -> DataError:
        layout, path = self._layout, self._source.path
        line = self._source.line_number(problem.place)
        if problem.num_fields != self._head.num_columns:
            text = f"{problem.num_fields} fields where {self._head.num_columns} are expected"
            if self._is_cut(problem.place):
                text += "; the file ends within this line"
            return DataError(text, path, line)
        what = "the label" if problem.column == layout.label_column else "the field"
        if not problem.content.strip():
            text = f"{what} is missing"
        else:
            shown = problem.content.decode("utf-8", "replace").rstrip("\n")
            if len(shown) > MAX_SHOWN_CHARS:
                shown = shown[:MAX_SHOWN_CHARS] + "…"
            kind = (
                "is not text" if self._is_text[problem.column] else "is not a finite float32 number"
            )
            text = f"{what} {shown!r} {kind}"
        return DataError(text, path, line, problem.column + 1)

    def _is_cut(self, place: int) -> bool:
        """Returns whether the line at a place is the last one and lacks its end."""
        size = self._source.num_bytes
        while place < size:
            block = os.pread(self._source.file, 1 << 20, place)
            if b"\n" in block:
                return False
            place += len(block)
        return True

    def _share(self, counts: list[int]) -> None:
        """Exchanges the wave's rows between nodes."""
        comm = self._team.comm
        if comm.num_nodes == 1:
            return
        assert self._numbers is not None
        assert self._codes is not None
        ends = self._num_rows + np.cumsum([0, *counts])
        bounds = []
        for node in range(comm.num_nodes):
            first = self._team.nodes.index(node)
            last = first + self._team.nodes.count(node)
            bounds.append((int(ends[first]), int(ends[last])))
        comm.local.barrier()  # all of the node have parsed
        first_row, last_row = bounds[0][0], bounds[-1][1]
        relative = [(start - first_row, stop - first_row) for start, stop in bounds]
        width = self._numbers.array.shape[1]
        comm.share_between_nodes(
            self._numbers.array[first_row:last_row].reshape(-1),
            [(start * width, stop * width) for start, stop in relative],
        )
        for column in self._codes.array:
            comm.share_between_nodes(column[first_row:last_row], relative)

    def _sort_names(self) -> dict[str, TextColumn]:
        """Returns the columns of text, their names sorted."""
        assert self._codes is not None
        codes = self._codes.array[:, : self._num_rows]
        node = self._team.comm.local
        mine = slice(*share_bounds(self._num_rows, node.rank, node.size))
        sorted_names = []
        for c, known in enumerate(self._names):
            try:
                names = [name.decode() for name in known]
            except UnicodeDecodeError as error:
                raise DataError(f"text is not UTF-8: {error}", self._source.path) from error
            order = sorted(range(len(names)), key=names.__getitem__)
            places = np.empty(len(names), np.int32)
            places[order] = np.arange(len(names), dtype=np.int32)
            codes[c, mine] = places[codes[c, mine]]
            sorted_names.append([names[i] for i in order])
        node.barrier()
        columns = [name for name in self._head.names if name in self._layout.text_columns]
        codes_of = dict(zip(columns, self._codes.keep(len(columns)), strict=True))
        names_of = dict(zip(columns, sorted_names, strict=True))
        return {
            name: TextColumn(names_of[name], codes_of[name][: self._num_rows])
            for name in self._layout.text_columns
        }


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


@contextmanager
def _open(path: Path, comm: Communicator) -> Iterator[_Source]:
    """Opens the file on every rank; collective."""

    def open_file() -> _Source:
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"cannot read the file: {error.strerror}", path) from error
        status = os.fstat(file)
        return _Source(path, file, status.st_size, status.st_mtime_ns)

    source = Attempt(open_file).agree(comm)
    try:
        sizes = comm.allgather(source.num_bytes)
        if len(set(sizes)) > 1:
            raise DataError(
                f"the file has {min(sizes)} bytes on one rank and {max(sizes)} on another", path
            )
        yield source
    finally:
        os.close(source.file)
