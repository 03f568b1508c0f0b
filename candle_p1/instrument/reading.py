"""When a rank read the bytes of a file: every read with its begin, its end and its bytes.

At most one log is active in a thread, and code that reads there reports to it. Threads that it
starts report to the log that was `current` where they were started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.instrument.phases import length, union
from candle_p1.records.rank_stats import Bytes, Seconds
from candle_p1.records.types import FileReading

NUM_INTERVALS = 50
"""In how many intervals of time a record says how fast a file was read."""


class Read(NamedTuple):
    """One read: its begin and end, by time.perf_counter, and its bytes."""

    begin_s: float
    end_s: float
    num_bytes: int


@dataclass
class ReadLog:
    """The reads of one rank from one file, in the order in which they ended.

    `zero_s` is a moment that is the same on all ranks, by this rank's time.perf_counter; None if
    the ranks read independently.
    """

    zero_s: float | None = None
    reads: list[Read] = field(default_factory=list)

    @contextmanager
    def noted(self, num_bytes: int) -> Iterator[None]:
        """Adds the body of ``with``, unless it raises an error; for any thread."""
        begin_s = time.perf_counter()
        yield
        self.reads.append(Read(begin_s, time.perf_counter(), num_bytes))

    def since_zero(self) -> NDArray[np.float64]:
        """Returns begin and end, in s from the common moment, and bytes of each read.

        The shape is (reads, 3); there are none if the ranks read independently.
        """
        if self.zero_s is None:
            return np.empty((0, 3))
        return np.array(self.reads, np.float64).reshape(-1, 3) - [self.zero_s, self.zero_s, 0]


class _ActiveLog(threading.local):
    """The active log of each thread: the ranks of a simulated job are threads."""

    log: ReadLog | None = None


_active = _ActiveLog()


@contextmanager
def active(log: ReadLog) -> Iterator[None]:
    """Makes a log the active one of this thread in the body of ``with``."""
    before, _active.log = _active.log, log
    try:
        yield
    finally:
        _active.log = before


def current() -> ReadLog:
    """Returns this thread's active log; without one, a log that nobody will read."""
    return _active.log or ReadLog()


def summarize_reading(of_ranks: Sequence[NDArray[np.float64]], zero_s: float) -> FileReading | None:
    """Returns what a record says about the reading of one file; None if no rank logged any.

    `of_ranks` has what `ReadLog.since_zero` returned on each rank; the common moment was at
    `zero_s` from the start of the run.
    """
    merged = [union(reads[:, :2]) for reads in of_ranks]
    found = [spans for spans in merged if len(spans)]
    if not found:
        return None
    together = union(np.concatenate(found))
    first_s, last_s, union_s = together[0, 0], together[-1, 1], length(together)
    edges_s = np.linspace(first_s, last_s, NUM_INTERVALS + 1)
    interval_s = (last_s - first_s) / NUM_INTERVALS
    every = np.concatenate(of_ranks)
    rates = every[:, 2] / np.maximum(every[:, 1] - every[:, 0], 1e-9)
    bytes_in = np.diff(_accumulated(every, rates, edges_s))
    ranks_in = np.diff(_accumulated(np.concatenate(found), None, edges_s))
    busy_s = [length(spans) for spans in merged]
    return FileReading(
        begin=Seconds.over([zero_s + spans[0, 0] if len(spans) else None for spans in merged]),
        end=Seconds.over([zero_s + spans[-1, 1] if len(spans) else None for spans in merged]),
        busy=Seconds.over(busy_s),
        read=Bytes.over([reads[:, 2].sum() for reads in of_ranks]),
        union_s=union_s,
        mean_ranks=sum(busy_s) / union_s if union_s else float(len(found)),
        interval_s=interval_s,
        num_ranks=(ranks_in / interval_s).tolist() if interval_s else [],
        bytes_per_s=(bytes_in / interval_s).tolist() if interval_s else [],
    )


def _accumulated(
    spans: NDArray[np.float64], rates: NDArray[np.float64] | None, times_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns, for each time, the integral until then over all spans of their rates, or of 1."""
    weights = np.ones(len(spans)) if rates is None else rates
    begins_s, ends_s = spans[:, 0], spans[:, 1]
    return np.array(
        [float(np.clip(at_s - begins_s, 0, ends_s - begins_s) @ weights) for at_s in times_s]
    )
