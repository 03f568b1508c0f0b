"""How the tables of a run are read: what is handed on to whatever reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from candle_p1.data.directory import data_directory
from candle_p1.data.source import OpenSource, open_together
from candle_p1.distributed.comm import Communicator, SerialCommunicator

GIB = 2**30
TOGETHER = ("parallel", "cached")
"""The methods by which the ranks of a job read a table together."""


@dataclass(frozen=True)
class CacheSettings:
    """Where caches are.

    Attributes:
        directory: None means ``cache`` in the data directory.
        limit_bytes: The space that all caches together may take; the least recently used are
            removed first. 0 means no limit.
        stage_directory: A directory local to each node, to which a cache is copied once; None
            means that it is not copied.
        in_use: Those that this run has made or read, which it does not remove; on rank 0.
    """

    directory: Path | None = None
    limit_bytes: int = 0
    stage_directory: Path | None = None
    in_use: set[Path] = field(default_factory=set, compare=False)

    @property
    def path(self) -> Path:
        """The directory."""
        return self.directory or data_directory() / "cache"


@dataclass(frozen=True)
class Loading:
    """How tables are read.

    Attributes:
        method: A name in candle_p1.data.loaders.READERS.
        comm: The ranks that need the tables, on nodes whose ranks can share memory.
        num_threads: The number of threads of each rank.
        cache: Where `cached` keeps its files.
        notify: Called with messages for the user: on one rank of each node if its shared memory is
            too small, and on rank 0 if a cache is rebuilt or removed.
        progress: Called on rank 0 while a compressed file is read, with its name, how many of its
            bytes have been read, and its size.
        block_bytes: How much a rank reads at a time, with `parallel`; None: it depends on the file.
        open_source: What opens a file for `parallel`; another one is used for measurements.
        warnings: What the user should know about how the ranks share the tables.
    """

    method: str = "parallel"
    comm: Communicator = field(default_factory=SerialCommunicator)
    num_threads: int = 1
    cache: CacheSettings = field(default_factory=CacheSettings)
    notify: Callable[[str], None] | None = None
    progress: Callable[[str, int, int], None] | None = None
    block_bytes: int | None = None
    open_source: OpenSource = open_together
    warnings: tuple[str, ...] = ()

    @property
    def num_copies(self) -> int:
        """The number of copies of a table that the job has: one for each node, or for each rank."""
        return self.comm.num_nodes if self.method in TOGETHER else self.comm.size
