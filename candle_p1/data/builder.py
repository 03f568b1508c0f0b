"""Building a table with all ranks of a job; each node has one copy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.shared import NodeArray, small_pages
from candle_p1.data.source import Head, Source
from candle_p1.data.table import CsvLayout, Table, TextColumn
from candle_p1.distributed.comm import Communicator, on_first_rank
from candle_p1.distributed.shared_file import NoRoomError, agree_on_room
from candle_p1.errors import DataError

Names = list[list[bytes]]  # distinct values, for each column of text


class Place(NamedTuple):
    """Where rows are parsed to: the table itself, or memory of this rank, to be written from there.

    Attributes:
        first: The first of the rows.
        numbers: The array for the numbers.
        codes: The array for the codes of the text.
        offset: The row of the table that corresponds to row 0 of these arrays.
        has_numbers: Whether the numbers are already in the table.
    """

    first: int
    numbers: NDArray[np.float32]
    codes: NDArray[np.int32]
    offset: int
    has_numbers: bool = True


class TableBuilder:
    """Space for as many rows as the file could have; only those that it has are kept at the end.

    Every field takes at least one byte of the file, which limits the number of rows. Only rows that
    are written take up memory.

    Creating one is collective; shared memory is allocated in `directory`.

    Attributes:
        source: The file.
        layout: What was known about it.
        head: What its first line says.
        is_text: Whether each column is text.
        numbers: float32, shape (rows, columns of numbers).
        codes: The codes of the text, int32, shape (columns of text, rows).

    Raises:
        NoRoomError: There is no shared memory; the same on all ranks.
    """

    def __init__(
        self, source: Source, layout: CsvLayout, head: Head, comm: Communicator, directory: Path
    ) -> None:
        self.source, self.layout, self.head, self._comm = source, layout, head, comm
        self.is_text = [name in layout.text_columns for name in head.names]
        self.is_text = self.is_text or [False] * head.num_columns  # without a header
        num_text = sum(self.is_text)
        self._names: list[dict[bytes, int]] = [{} for _ in range(num_text)]
        # The rows that this rank has parsed: for each column of text and code, its value's index.
        self._mine: list[tuple[slice, list[NDArray[np.int32]]]] = []
        self._scratch: list[NDArray[np.float32]] = []  # memory of places that are not used any more
        # One may have no newline, and one may be cut off.
        num_rows = source.most_text_bytes // head.num_columns + 2

        def allocate() -> tuple[NodeArray, NodeArray]:
            shape = num_rows, head.num_columns - num_text
            numbers = NodeArray(shape, np.float32, comm.local, directory)
            return numbers, NodeArray((num_text, num_rows), np.int32, comm.local, directory)

        self._numbers, self._codes = agree_on_room(comm, allocate)
        self.numbers: NDArray[np.float32] = self._numbers.array
        self.codes: NDArray[np.int32] = self._codes.array

    def place(self, first: int, last: int) -> Place:
        """Returns where this rank must put the rows that it parses."""
        size, width = last - first, self.numbers.shape[1]
        if self._comm.local.size == 1:
            self._numbers.fill(first * width, last * width)
            return Place(first, self.numbers, self.codes, 0)
        codes = np.empty((len(self.codes), size), np.int32)
        with suppress(NoRoomError):  # put() will raise it
            if self._numbers.fill(first * width, last * width):
                return Place(first, self.numbers[first:last], codes, first)
        scratch = self._scratch.pop() if self._scratch else np.empty(0, np.float32)
        if len(scratch) < size * width:
            scratch = np.frombuffer(small_pages(4 * size * width), np.float32)
        numbers = scratch[: size * width].reshape(size, width)
        return Place(first, numbers, codes, first, has_numbers=False)

    def learn(self, names: Names, rows: slice) -> None:
        """Takes note of the text of some rows, whose codes are indices into `names`."""
        here = [
            np.array([known.setdefault(name, len(known)) for name in column], np.int32)
            for known, column in zip(self._names, names, strict=True)
        ]
        self._mine.append((rows, here))

    def put(self, place: Place) -> None:
        """Writes the rows of a place to the table; the place must not be used any more.

        Raises:
            NoRoomError: There is no memory for them.
        """
        num_rows, width = self.numbers.shape
        if place.codes is not self.codes:
            for column, codes in enumerate(place.codes):
                self._codes.write(column * num_rows + place.first, codes)
        if not place.has_numbers:
            if width:
                self._numbers.write(place.first * width, place.numbers)
            scratch: Any = place.numbers.base
            self._scratch.append(scratch)

    def share(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Gives every node the rows of all nodes; collective.

        Args:
            bounds: For each node, its first row and the one after its last, without gaps.
        """
        first, last = bounds[0][0], bounds[-1][1]
        width = self.numbers.shape[1]
        self._comm.share_between_nodes(
            self.numbers[first:last].reshape(-1),
            [((start - first) * width, (stop - first) * width) for start, stop in bounds],
        )
        for column in self.codes:
            self._comm.share_between_nodes(
                column[first:last], [(start - first, stop - first) for start, stop in bounds]
            )

    def sort_names(self) -> None:
        """Changes this rank's codes to indices into the sorted values of all ranks; collective.

        Only now, once, because columns of text can be as long as the file.

        Raises:
            DataError: A value is not UTF-8; the same on all ranks.
        """
        comm = self._comm

        def sort(of_ranks: list[list[bytes]] | None) -> list[str]:
            everyones = {name for names in of_ranks or () for name in names}
            try:
                return sorted(name.decode() for name in everyones)
            except UnicodeDecodeError as error:
                raise DataError(f"its text is not UTF-8: {error}", self.source.path) from error

        self._sorted: list[list[str]] = []
        for column, (codes, known) in enumerate(zip(self.codes, self._names, strict=True)):
            names = on_first_rank(comm, sort, comm.gather(list(known)))
            place = {name: i for i, name in enumerate(names)}
            places = np.array([place[name.decode()] for name in known], np.int32)
            for rows, values in self._mine:
                codes[rows] = places[values[column]].take(codes[rows])
            self._sorted.append(names)

    def give_back(self) -> None:
        """Frees what has been written, on all ranks; the builder must not be used any more."""
        self._numbers.keep(0)
        self._codes.keep(0)

    def finish(self, num_rows: int) -> Table:
        """Returns a table of the first rows; collective."""
        self._comm.local.barrier()
        codes = self._codes.keep(len(self.codes))[:, :num_rows]
        text = [name for name in self.head.names if name in self.layout.text_columns]
        columns = {name: TextColumn(self._sorted[c], codes[c]) for c, name in enumerate(text)}
        return Table(
            self._numbers.keep(num_rows),
            [name for name in self.head.names if name not in columns],
            {name: columns[name] for name in self.layout.text_columns},
        )
