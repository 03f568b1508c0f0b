"""Reading a cache file with all ranks of a job: each byte once, by one of them.

The slabs of the file are dealt to the nodes and, within a node, to its ranks, which read and check
them in place, in the memory that the node's ranks share. Then the nodes send each other their
slabs, also in place, so that there is no second buffer. If each node has a copy of the file on a
disk of its own, its ranks read all slabs.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from candle_p1.data.cache_file import UnfitCacheError
from candle_p1.data.read_ahead import agree_on_zero
from candle_p1.data.shared import allocate
from candle_p1.data.table import Table, TextColumn
from candle_p1.distributed.comm import Attempt
from candle_p1.instrument import reading
from candle_p1.instrument.phases import part
from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from candle_p1.data.cache_file import Bytes, Header
    from candle_p1.data.shared import NodeArray
    from candle_p1.distributed.comm import Communicator

    Slab = tuple[int, int, str]  # first byte, byte after the last, digest

ROUND_SLABS = 128
"""How many slabs are sent at a time: their 1 GiB is less than MPI can count."""


class CacheContent(NamedTuple):
    """What a cache holds, and where.

    Attributes:
        header: The header.
        first_byte: Where the numbers begin in the file.
    """

    header: Header
    first_byte: int

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return self.first_byte + sum(self.header.part_bytes)


def shares_of_nodes(units: Sequence[tuple[int, int]], num_nodes: int) -> list[tuple[int, int]]:
    """Returns each node's share of units of bytes that follow each other without gaps.

    Args:
        units: The first byte of each unit and the one after its last; at least one unit.
        num_nodes: The number of nodes.

    Returns:
        The first byte of each node's share and the one after its last, from the first unit's first
        byte on. If there are fewer units than nodes, some shares are empty.
    """
    begin = units[0][0]
    starts = [first - begin for first, _ in units] + [units[-1][1] - begin]
    shares = (share_bounds(len(units), node, num_nodes) for node in range(num_nodes))
    return [(starts[first], starts[last]) for first, last in shares]


def agree_that_fit(problem: str | None, comm: Communicator) -> None:
    """Raises UnfitCacheError on all ranks if one of them has found a problem; collective."""
    found = comm.first(problem)
    if found:
        raise UnfitCacheError(found[1])


class CacheReader:
    """Reads a cache; creating one is collective.

    Args:
        content: What it holds.
        comm: The ranks that need it.
        on_each_node: Whether each node reads a file of its own.
        num_threads: The number of threads of each rank.
        notify: Called, on one rank of each node, if its shared memory is too small.

    Raises:
        DataError: There is no space for the content; the same on all ranks.
    """

    def __init__(
        self,
        content: CacheContent,
        comm: Communicator,
        *,
        on_each_node: bool,
        num_threads: int = 1,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self._content, self._comm, self._num_threads = content, comm, num_threads
        self._num_nodes = 1 if on_each_node else comm.num_nodes
        slabs = content.header.slabs()
        self._rounds = [slabs[i : i + ROUND_SLABS] for i in range(0, len(slabs), ROUND_SLABS)]
        self._num_bytes, node = sum(content.header.part_bytes), comm.local

        def make_room() -> NodeArray | None:
            """Returns no memory for a single process with a whole file, which it can map."""
            if node.size == 1 and self._num_nodes == 1:
                return None
            return allocate((self._num_bytes,), np.uint8, node, notify)

        self._array = Attempt(make_room).agree(comm)

    def read(self, path: Path) -> Table:
        """Returns the table; collective.

        Only ranks that have a slab to read open the file.

        Raises:
            UnfitCacheError: Some rank cannot read it, or found it damaged; the same on all ranks.
        """
        comm, array, problem = self._comm, self._array, None
        agree_on_zero(comm)
        values: Bytes = np.empty(0, np.uint8) if array is None else array.array
        try:
            with part("read"):
                values = self._read_own(path, values)
        except (UnfitCacheError, OSError, ValueError) as error:  # the last: it is empty by now
            problem = str(error)
        try:
            with part("communicate"):
                agree_that_fit(problem, comm)
                self._share(values)
                comm.local.barrier()
        finally:
            if array is not None:
                values = array.keep(self._num_bytes)
        table = self._table(values)
        agree_that_fit(_problem_of_text(table), comm)
        return table

    def _read_own(self, path: Path, values: Bytes) -> Bytes:
        """Reads and checks this rank's slabs; returns the array that they are in."""
        array, mine, log = self._array, self._slabs_of_rank(), reading.current()
        if not mine:
            return values
        with ExitStack() as stack:
            file = stack.enter_context(path.open("rb"))
            if array is None:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                values = np.frombuffer(mapping, np.uint8)[self._content.first_byte :]

            def check(slab: Slab) -> None:
                start, stop, digest = slab
                into = values[start:stop]
                with log.noted(stop - start):
                    if array is not None:
                        fill(file.fileno(), into, self._content.first_byte + start)
                    if xxhash.xxh3_64_hexdigest(into) != digest:
                        raise UnfitCacheError("its content does not match its digest")

            pool = stack.enter_context(ThreadPoolExecutor(self._num_threads))
            list(pool.map(check, mine))
        return values

    def _slabs_of_rank(self) -> list[Slab]:
        comm, mine = self._comm, []
        node = comm.node if self._num_nodes > 1 else 0
        for slabs in self._rounds:
            of_node = slabs[slice(*share_bounds(len(slabs), node, self._num_nodes))]
            mine += of_node[slice(*share_bounds(len(of_node), comm.local_rank, comm.local_size))]
        return mine

    def _share(self, values: Bytes) -> None:
        """Sends all nodes the slabs of each."""
        if self._num_nodes == 1:
            return
        for slabs in self._rounds:
            shares = shares_of_nodes([slab[:2] for slab in slabs], self._num_nodes)
            self._comm.share_between_nodes(values[slabs[0][0] : slabs[-1][1]], shares)

    def _table(self, content: Bytes) -> Table:
        header = self._content.header
        values, *codes = np.split(content, np.cumsum(header.part_bytes)[:-1])
        text = {
            name: TextColumn(names, column.view(np.int32))
            for (name, names), column in zip(header.text.items(), codes, strict=True)
        }
        return Table(values.view(np.float32).reshape(header.shape), header.columns, text)


def fill(file: int, into: Bytes, position: int) -> None:
    """Fills an array of bytes from a position of a file on.

    Raises:
        UnfitCacheError: The file is too short.
        OSError: It cannot be read.
    """
    view, done = memoryview(into), 0
    while done < len(view):
        num = os.preadv(file, [view[done:]], position + done)
        if num == 0:
            raise UnfitCacheError("it was changed while it was read")
        done += num


def _problem_of_text(table: Table) -> str | None:
    for each in table.text.values():
        if len(each) and not 0 <= each.codes.min() <= each.codes.max() < len(each.names):
            return "its codes of text are not those of its header"
    return None
