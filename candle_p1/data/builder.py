"""A table in the making, by the ranks of a job, of which each node has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.data.shared import NodeArray
from candle_p1.data.table import Table, TextColumn
from candle_p1.distributed.comm import Attempt
from candle_p1.errors import DataError
from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.data.source import Head
    from candle_p1.data.table import CsvLayout
    from candle_p1.distributed.comm import Communicator

    Names = list[list[bytes]]  # distinct texts, for each column of text

SPARE_ROWS = 8


class TableBuilder:
    """Room for rows whose number is not known beforehand, and the texts met so far. Collective.

    Args:
        path: The file, for messages.
        layout: What it looks like.
        head: What its first line tells.
        comm: The ranks.
        notify: Is told, on one rank of a node, where its shared memory is short.

    Attributes:
        is_text: For each column, whether it holds text.
    """

    def __init__(
        self,
        path: Path,
        layout: CsvLayout,
        head: Head,
        comm: Communicator,
        notify: Callable[[str], None] | None,
    ) -> None:
        self._path, self._layout, self._head = path, layout, head
        self._comm, self._notify = comm, notify
        self.is_text = [name in layout.text_columns for name in head.names]
        self.is_text += [False] * (head.num_columns - len(head.names))
        self._num_text = sum(self.is_text)
        self._names: list[dict[bytes, int]] = [{} for _ in range(self._num_text)]
        self._numbers, self._codes = self._allocate(0)

    @property
    def numbers(self) -> NDArray[np.float32]:
        """Takes the numbers: shape (rows, columns of numbers)."""
        return self._numbers.array

    @property
    def codes(self) -> NDArray[np.int32]:
        """Takes the codes of the texts: shape (columns of text, rows)."""
        return self._codes.array

    def reserve(self, num_rows: int, num_expected: int) -> None:
        """Sees to it that there is room for a number of rows.

        Args:
            num_rows: Needed now.
            num_expected: Needed in the end, roughly: makes room for these where it has to be made.
        """
        num_before = len(self.numbers)
        if num_rows <= num_before:
            return
        numbers, codes = self._numbers, self._codes
        self._numbers, self._codes = self._allocate(max(num_rows, num_expected) + SPARE_ROWS)
        if self._comm.local_rank == 0:
            self.numbers[:num_before] = numbers.array
            self.codes[:, :num_before] = codes.array
        self._comm.local.barrier()
        numbers.keep(0)
        codes.keep(0)

    def learn(self, parts: Sequence[tuple[Names, slice]]) -> None:
        """Makes the codes of this rank's rows those into the texts that all ranks have met.

        Args:
            parts: The texts to which the codes of some rows are indices, and these rows.
        """
        if self._num_text == 0:
            return
        new = [
            [name for names, _ in parts for name in names[c] if name not in known]
            for c, known in enumerate(self._names)
        ]
        for everyones in self._comm.allgather(new):
            for known, column in zip(self._names, everyones, strict=True):
                for name in column:
                    known.setdefault(name, len(known))
        for names, rows in parts:
            for codes, known, own in zip(self.codes, self._names, names, strict=True):
                _recode(codes[rows], [known[name] for name in own])

    def share(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Gives all nodes the rows of each.

        Args:
            bounds: First row and the one after the last, by node; each begins where the one before
                ends.
        """
        if len(bounds) == 1:
            return
        self._comm.local.barrier()  # all of this node have written theirs
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

    def finish(self, num_rows: int) -> Table:
        """Returns the table of the first rows, the texts sorted.

        Raises:
            DataError: There are none, or a text is not UTF-8.
        """
        if num_rows == 0:
            raise DataError("the file holds no rows", self._path)
        self._comm.local.barrier()
        text_names = [self._sort(c, num_rows) for c in range(self._num_text)]
        self._comm.local.barrier()
        codes = self._codes.keep(self._num_text)[:, :num_rows]
        text = [name for name in self._head.names if name in self._layout.text_columns]
        columns = {name: TextColumn(text_names[c], codes[c]) for c, name in enumerate(text)}
        return Table(
            self._numbers.keep(num_rows),
            [name for name in self._head.names if name not in columns],
            {name: columns[name] for name in self._layout.text_columns},
        )

    def _sort(self, column: int, num_rows: int) -> list[str]:
        """Returns a column's texts sorted; recodes this rank's share of the node's rows."""
        try:
            names = [name.decode() for name in self._names[column]]
        except UnicodeDecodeError as error:
            raise DataError(f"text is not UTF-8: {error}", self._path) from error
        order = sorted(range(len(names)), key=names.__getitem__)
        places = np.empty(len(names), np.int64)
        places[order] = np.arange(len(names))
        mine = slice(*share_bounds(num_rows, self._comm.local_rank, self._comm.local_size))
        _recode(self.codes[column, mine], places)
        return [names[i] for i in order]

    def _allocate(self, num_rows: int) -> tuple[NodeArray, NodeArray]:
        """Returns room for numbers and codes; what a node cannot have is an error on all."""
        node, num_numbers = self._comm.local, self._head.num_columns - self._num_text

        def allocate() -> tuple[NodeArray, NodeArray]:
            return (
                NodeArray((num_rows, num_numbers), np.float32, node, self._notify),
                NodeArray((self._num_text, num_rows), np.int32, node, self._notify),
            )

        return Attempt(allocate).agree(self._comm)


def _recode(codes: NDArray[np.int32], places: Any) -> None:
    """Replaces each code by the place it has in another order."""
    codes[:] = np.asarray(places, np.int32)[codes]
