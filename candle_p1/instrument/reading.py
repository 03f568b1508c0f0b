"""When a rank read the bytes of a file: every read with its begin, its end and its bytes.

As with phases, at most one log is active in a process. Code that reads reports to it, from any
thread; outside a run this does nothing.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Read(NamedTuple):
    """One read.

    Attributes:
        begin_s: When it began, by time.perf_counter.
        end_s: When it ended.
        num_bytes: What it read.
    """

    begin_s: float
    end_s: float
    num_bytes: int


@dataclass
class ReadLog:
    """The reads of one rank from one file.

    Attributes:
        zero_s: A moment that is the same on all ranks, by this rank's time.perf_counter; None if
            the ranks read independently.
        reads: The reads, in the order in which they ended.
    """

    zero_s: float | None = None
    reads: list[Read] = field(default_factory=list)


_active: ReadLog | None = None


@contextmanager
def active(log: ReadLog) -> Iterator[None]:
    """Makes a log the active one in the body of ``with``."""
    global _active
    before, _active = _active, log
    try:
        yield
    finally:
        _active = before


def set_zero(zero_s: float) -> None:
    """Tells the active log, if any, a moment that is the same on all ranks."""
    if _active is not None:
        _active.zero_s = zero_s


@contextmanager
def noted(num_bytes: int) -> Iterator[None]:
    """Adds the body of ``with``, unless it raises an error, to the active log; for any thread."""
    log, begin_s = _active, time.perf_counter()
    yield
    if log is not None:
        log.reads.append(Read(begin_s, time.perf_counter(), num_bytes))
