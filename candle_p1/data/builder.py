"""Building a table with all ranks of a job; each node has one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.shared import NodeArray, allocate, small_pages
from candle_p1.data.source import Head, Source
from candle_p1.data.table import CsvLayout, Table, TextColumn
from candle_p1.distributed.comm import Communicator, agree, on_first_rank
from candle_p1.distributed.shared_file import agree_on_room
from candle_p1.errors import DataError

Names = list[list[bytes]]  # distinct values, for each column of text


class TableBuilder:
    """Space for as many rows as the file could have; only those that it has are kept at the end.

    Every field takes at least one byte of the file, which limits the number of rows. Only rows that
    are written take up memory.

    Creating one is collective; shared memory is allocated in `directory`.

    Attributes:
        source: The file.
        layout: What was known about it.
        is_text: Whether each column is text.

    Raises:
        NoRoomError: There is no shared memory; the same on all ranks.
    """

    def __init__(
        self, source: Source, layout: CsvLayout, head: Head, comm: Communicator, directory: Path
    ) -> None:
        self.source, self.layout, self._head, self._comm = source, layout, head, comm
        self.is_text = head.is_text(layout)
        self._names: list[dict[bytes, int]] = [{} for _ in range(sum(self.is_text))]
        # Of the rows that this rank has parsed: the first, and for each column of text their codes
        # and, by code, the place of the value in `_names`.
        self._mine: list[tuple[int, NDArray[np.int32], list[NDArray[np.int32]]]] = []
        self._scratch: list[NDArray[np.float32]] = []  # memory that is not in use
        # One may have no newline, and one may be cut off.
        num_rows = source.most_text_bytes // head.num_columns + 2
        shape = num_rows, head.num_columns - len(self._names)
        self._numbers = agree_on_room(
            comm, lambda: NodeArray(shape, np.float32, comm.local, directory)
        )

    @contextmanager
    def rows(
        self, first: int, last: int
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]:
        """Yields where to parse some rows to, in any thread: their numbers, and codes of text.

        The numbers are in the table afterwards; `learn` takes the codes. The arrays are shorter if
        the table cannot have so many rows.

        Raises:
            NoRoomError: There is no memory for them.
        """
        num_rows, width = self._numbers.array.shape
        first, last = min(first, num_rows), min(last, num_rows)
        codes = np.empty((len(self._names), last - first), np.int32)
        if self._numbers.fill(first * width, last * width):
            yield self._numbers.array[first:last], codes
            return
        size = (last - first) * width
        scratch = np.empty(0, np.float32)
        with suppress(IndexError):  # another thread may take the last one first
            scratch = self._scratch.pop()
        if len(scratch) < size:
            scratch = np.frombuffer(small_pages(4 * size), np.float32)
        numbers = scratch[:size].reshape(last - first, width)
        yield numbers, codes
        self._numbers.write(first * width, numbers)
        self._scratch.append(scratch)

    def learn(
        self, first: int, codes: NDArray[np.int32], names: Sequence[tuple[slice, Names]]
    ) -> None:
        """Takes note of the text of rows from `first` on, whose codes are indices into `names`."""
        for rows, of_rows in names if self._names else ():
            here = [
                np.array([known.setdefault(name, len(known)) for name in found], np.int32)
                for known, found in zip(self._names, of_rows, strict=True)
            ]
            self._mine.append((first + rows.start, codes[:, rows], here))

    def place_text(self, num_rows: int, notify: Callable[[str], None] | None) -> None:
        """Writes this rank's codes, now indices into the sorted values of all ranks; collective.

        Only now, once, because columns of text can be as long as the file.

        Raises:
            DataError: A value is not UTF-8, or there is no memory; the same on all ranks.
        """
        comm = self._comm

        def sort(of_ranks: list[list[bytes]] | None) -> list[str]:
            everyones = {name for names in of_ranks or () for name in names}
            try:
                return sorted(name.decode() for name in everyones)
            except UnicodeDecodeError as error:
                raise DataError(f"its text is not UTF-8: {error}", self.source.path) from error

        self._sorted = [on_first_rank(comm, sort, comm.gather([*known])) for known in self._names]
        shape = len(self._names), num_rows
        self._codes = agree(comm, lambda: allocate(shape, np.int32, comm.local, notify))
        places = [{name.encode(): i for i, name in enumerate(names)} for names in self._sorted]
        final = [
            np.array([place[name] for name in known], np.int32)
            for place, known in zip(places, self._names, strict=True)
        ]
        while self._mine:
            first, codes, of_codes = self._mine.pop()
            columns = zip(self._codes.array, final, codes, of_codes, strict=True)
            for into, place, column, here in columns:
                into[first : first + len(column)] = place[here].take(column)

    def share(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Gives every node the rows of all nodes; collective.

        Args:
            bounds: For each node, its first row and the one after its last, without gaps.
        """
        first, last = bounds[0][0], bounds[-1][1]
        for rows in (self._numbers.array, *self._codes.array):
            width = rows[:1].size
            self._comm.share_between_nodes(
                rows[first:last].reshape(-1),
                [((start - first) * width, (stop - first) * width) for start, stop in bounds],
            )

    def give_back(self) -> None:
        """Frees what has been written, on all ranks; the builder must not be used any more."""
        self._numbers.keep(0)

    def finish(self, num_rows: int) -> Table:
        """Returns a table of the first rows; collective."""
        self._comm.local.barrier()
        text = [name for name in self._head.names if name in self.layout.text_columns]
        codes: Any = self._codes.keep(len(text))
        columns = dict(zip(text, map(TextColumn, self._sorted, codes), strict=True))
        return Table(
            self._numbers.keep(num_rows),
            [name for name in self._head.names if name not in columns],
            {name: columns[name] for name in self.layout.text_columns},
        )
