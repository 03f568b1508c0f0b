"""Reading a cache file with all ranks of a job: each byte once, by one of them.

The slabs of the file are dealt to the nodes and, within a node, to its ranks, which read and check
them in place, in the memory that the node's ranks share. Then the nodes send each other their
slabs, also in place, so that there is no second buffer. If each node has a copy of the file on a
disk of its own, its ranks read all slabs.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from candle_p1.data.cache_file import Bytes, Header, Slab, UnfitCacheError
from candle_p1.data.loading import Loading
from candle_p1.data.read_ahead import agree_on_zero
from candle_p1.data.shared import NodeArray, allocate
from candle_p1.data.source import fill
from candle_p1.data.table import Table, TextColumn
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.instrument import reading
from candle_p1.instrument.phases import region
from candle_p1.scaling import share_bounds

ROUND_SLABS = 128
"""How many slabs are sent at a time: their 1 GiB is less than MPI can count."""


def read_content(
    path: Path, header: Header, first_byte: int, loading: Loading, *, on_each_node: bool
) -> Table:
    """Returns the table in a cache file; collective.

    Only ranks that have a slab to read open the file.

    Args:
        path: The file, of this node if `on_each_node`.
        header: Its header, on all ranks.
        first_byte: Where the numbers begin in it.
        loading: Who needs the table.
        on_each_node: Whether each node reads a file of its own.

    Raises:
        DataError: There is no space for the content; the same on all ranks.
        UnfitCacheError: Some rank cannot read it, or found it damaged; the same on all ranks.
    """
    comm, node, slabs = loading.comm, loading.comm.local, header.slabs()
    num_nodes, num_bytes = 1 if on_each_node else comm.num_nodes, sum(header.part_bytes)
    rounds = [
        _divide(slabs[i : i + ROUND_SLABS], num_nodes) for i in range(0, len(slabs), ROUND_SLABS)
    ]
    of_node = (of_nodes[comm.node if num_nodes > 1 else 0] for of_nodes in rounds)
    mine = [slab for each in of_node for slab in _divide(each, node.size)[node.rank]]

    def make_room() -> NodeArray | None:
        """Returns no memory for a single process with a whole file, which it can map."""
        if node.size == 1 and num_nodes == 1:
            return None
        return allocate((num_bytes,), np.uint8, node, loading.notify)

    array, problem = agree(comm, make_room), None
    content: Bytes = np.empty(0, np.uint8) if array is None else array.array
    agree_on_zero(comm)
    try:
        with region("read"):
            if mine:
                content = _read_slabs(path, mine, first_byte, array, loading.num_threads)
    except (UnfitCacheError, OSError, ValueError) as error:  # the last: it is empty by now
        problem = str(error)
    try:
        with region("communicate"):
            _raise_on_all(problem, comm)
            if num_nodes > 1:
                for of_nodes in rounds:
                    _share(content, of_nodes, comm)
            node.barrier()
    finally:
        if array is not None:
            content = array.keep(num_bytes)
    values, *codes = np.split(content, np.cumsum(header.part_bytes)[:-1])
    text = {
        name: TextColumn(names, column.view(np.int32))
        for (name, names), column in zip(header.text.items(), codes, strict=True)
    }
    _raise_on_all(_problem_of_text(text.values()), comm)
    return Table(values.view(np.float32).reshape(header.shape), header.columns, text)


def _divide(slabs: Sequence[Slab], num: int) -> list[Sequence[Slab]]:
    return [slabs[slice(*share_bounds(len(slabs), each, num))] for each in range(num)]


def _read_slabs(
    path: Path, slabs: Sequence[Slab], first_byte: int, array: NodeArray | None, num_threads: int
) -> Bytes:
    """Reads and checks some slabs; returns the array that they are in: `array` if it is given."""
    log = reading.current()
    with path.open("rb") as file, ThreadPoolExecutor(num_threads) as pool:
        if array is None:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            content: Bytes = np.frombuffer(mapping, np.uint8)[first_byte:]
        else:
            content = array.array

        def check(slab: Slab) -> None:
            start, stop, digest = slab
            into = content[start:stop]
            with log.noted(stop - start):
                is_read = array is None or fill(file.fileno(), into.data, first_byte + start)
                if not is_read:
                    raise UnfitCacheError("it was changed while it was read")
                if xxhash.xxh3_64_hexdigest(into) != digest:
                    raise UnfitCacheError("its content does not match its digest")

        list(pool.map(check, slabs))
    return content


def _share(content: Bytes, of_nodes: Sequence[Sequence[Slab]], comm: Communicator) -> None:
    """Gives every node the slabs of a round, of which each has read some; collective."""
    sizes = [sum(stop - start for start, stop, _ in slabs) for slabs in of_nodes]
    stops = np.cumsum(sizes).tolist()
    begin = next(slabs[0][0] for slabs in of_nodes if slabs)
    bounds = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    comm.share_between_nodes(content[begin : begin + stops[-1]], bounds)


def _raise_on_all(problem: str | None, comm: Communicator) -> None:
    """Raises UnfitCacheError on all ranks if one of them has found a problem; collective."""
    found = comm.first(problem)
    if found:
        raise UnfitCacheError(found[1])


def _problem_of_text(columns: Iterable[TextColumn]) -> str | None:
    for each in columns:
        if len(each) and not 0 <= each.codes.min() <= each.codes.max() < len(each.names):
            return "its codes of text are not those of its header"
    return None
