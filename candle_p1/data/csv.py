"""Reading tables with one of several methods, chosen by name.

- parallel: each rank of a job reads a part (candle_p1.data.cooperative).
- cached: the same the first time; later, from a binary file (candle_p1.data.cache).
- original, chunked, chunked_rows, dask, arrow, polars: each rank reads the whole file through a
  data frame (candle_p1.data.frames).

All methods give bit-identical tables and the same errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from candle_p1.data.cache import CacheSettings, read_cached
from candle_p1.data.cooperative import read_together
from candle_p1.data.frames import FRAME_READERS, read_by_frame
from candle_p1.data.source import open_together
from candle_p1.data.table import CsvLayout, Table
from candle_p1.distributed.comm import Communicator, SerialCommunicator
from candle_p1.errors import ParameterError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from candle_p1.data.source import OpenSource

READERS = ("parallel", "cached", *FRAME_READERS)
LIBRARIES = {"dask": "dask", "arrow": "pyarrow", "polars": "polars"}
"""Libraries that a reader needs and that may not be installed."""


@dataclass(frozen=True)
class Loading:
    """How tables are read.

    Attributes:
        method: A name in READERS.
        comm: The ranks that need the tables, on nodes whose ranks can share memory.
        num_threads: The number of threads of each rank.
        cache: Where `cached` keeps its files.
        notify: Called with messages for the user.
        block_bytes: How much a rank reads at a time, with `parallel`; None: it depends on the file.
        open_source: What opens a file for `parallel`; another one is used for measurements.
        warnings: What the user should know about how the ranks share the tables.
    """

    method: str = "parallel"
    comm: Communicator = field(default_factory=SerialCommunicator)
    num_threads: int = 1
    cache: CacheSettings = field(default_factory=CacheSettings)
    notify: Callable[[str], None] | None = None
    block_bytes: int | None = None
    open_source: OpenSource = open_together
    warnings: tuple[str, ...] = ()

    @property
    def num_copies(self) -> int:
        """The number of copies of a table that the job has: one for each node, or for each rank."""
        return self.comm.size if self.method in FRAME_READERS else self.comm.num_nodes


def installed_readers() -> list[str]:
    """Returns the names of the readers whose library is installed."""
    return [name for name in READERS if name not in LIBRARIES or find_spec(LIBRARIES[name])]


def read_table(path: Path, loading: Loading, layout: CsvLayout | None = None) -> Table:
    """Reads a table; collective over the ranks of `loading` if the method is parallel or cached.

    By default, the file has numbers separated by commas, without a header.

    Returns:
        The table. Missing numbers, if allowed, are NaN. With parallel and cached, the ranks of a
        node share one copy: it is read-only, and candle_p1.data.transforms changes it.

    Raises:
        DataError: The file is missing or empty, lacks a column, or has rows of unequal length or a
            field that is empty, not a finite number or out of float32's range.
        ParameterError: There is no such method.
        SetupError: The method's library is not installed.
    """
    method, layout = loading.method, layout or CsvLayout()
    if method not in READERS:
        raise ParameterError(
            f"loader {method!r}{did_you_mean(method, READERS)}: choose one of {', '.join(READERS)}"
        )
    if method in FRAME_READERS:
        return read_by_frame(path, method, layout)
    comm, num_threads, notify = loading.comm, loading.num_threads, loading.notify
    if method == "cached":
        return read_cached(
            path, layout, comm, loading.cache, num_threads=num_threads, notify=notify
        )
    return read_together(
        path,
        layout,
        comm,
        num_threads=num_threads,
        block_bytes=loading.block_bytes,
        notify=notify,
        open_source=loading.open_source,
    )
