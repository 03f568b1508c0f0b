"""The communication of one rank: every collective by name, and messages by size.

As with phases, at most one log is active in a process; code that communicates reports to it through
`collective` or `note_collective`.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from candle_p1.instrument import phases
from candle_p1.records.spread import Seconds
from candle_p1.records.types import (
    ClockWaitsFor,
    Collective,
    CommunicationFacts,
    MessageSize,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass
class CallTotals:
    """Totals over the calls of one operation, or over the messages of one size class.

    Attributes:
        num_calls: The number of calls.
        num_bytes: The bytes that this rank contributed.
        seconds: The time from contributing to having the result; each of several calls that overlap
            in time counts in full.
    """

    num_calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_calls: int, num_bytes: int, seconds: float) -> None:
        """Adds calls."""
        self.num_calls += num_calls
        self.num_bytes += num_bytes
        self.seconds += seconds


@dataclass
class CommunicationLog:
    """The communication of one rank.

    Attributes:
        by_name: By library and name of the operation, such as ("mpi", "allgather").
        by_size: By library and the binary logarithm of a message's bytes, rounded down; messages
            without bytes are left out.
    """

    by_name: dict[tuple[str, str], CallTotals] = field(default_factory=dict)
    by_size: dict[tuple[str, int], CallTotals] = field(default_factory=dict)

    def add(
        self, library: str, name: str, num_bytes: int, seconds: float, num_calls: int = 1
    ) -> None:
        """Adds calls of one message size.

        Args:
            library: "mpi", or the name of an engine.
            name: The operation, and what it acts on.
            num_bytes: The bytes of one call.
            seconds: The time of all calls.
            num_calls: The number of calls.
        """
        total = num_calls * num_bytes
        self.by_name.setdefault((library, name), CallTotals()).add(num_calls, total, seconds)
        if num_bytes:
            size = (library, num_bytes.bit_length() - 1)
            self.by_size.setdefault(size, CallTotals()).add(num_calls, total, seconds)


_log: CommunicationLog | None = None


@contextmanager
def active(log: CommunicationLog | None) -> Iterator[None]:
    """Makes a log the active one in the body of ``with``; None: nothing is logged."""
    global _log
    before, _log = _log, log
    try:
        yield
    finally:
        _log = before


@contextmanager
def collective(library: str, name: str, count_bytes: Callable[[], int]) -> Iterator[None]:
    """Times a blocking operation, for the active log and the current phase.

    Args:
        library: "mpi", or the name of an engine.
        name: The operation.
        count_bytes: Returns the bytes this rank contributes; called only if a log is active.
    """
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - begin
        note_collective(library, name, 0 if _log is None else count_bytes(), seconds)


def note_collective(library: str, name: str, num_bytes: int, seconds: float) -> None:
    """Adds an operation that this rank waited for to the active log and the current phase."""
    phases.add_communication(seconds)
    if _log is not None:
        _log.add(library, name, num_bytes, seconds)


def summarize_communication(
    logs: Sequence[CommunicationLog],
    *,
    logged: bool,
    clock_waits_for: ClockWaitsFor | None = None,
) -> CommunicationFacts:
    """Returns the collectives of all ranks as a run record holds them.

    A bandwidth is that of one rank: its bytes divided by its seconds, including the time it
        waited for others.

    Args:
        logs: The log of each rank.
        logged: Whether collectives were to be logged.
        clock_waits_for: How gradient allreduces were timed; None if none were.
    """
    nothing = CallTotals()
    operations = list(dict.fromkeys(key for log in logs for key in log.by_name))
    sizes = sorted({key for log in logs for key in log.by_size})
    return CommunicationFacts(
        logged=logged,
        clock_waits_for=clock_waits_for,
        collectives=[
            Collective(
                name=name,
                **_sums(library, [log.by_name.get((library, name), nothing) for log in logs]),
            )
            for library, name in operations
        ],
        message_sizes=[
            _message_size(
                library, size, [log.by_size.get((library, size), nothing) for log in logs]
            )
            for library, size in sizes
        ],
    )


def _message_size(library: str, size: int, of_ranks: Sequence[CallTotals]) -> MessageSize:
    seconds = sum(each.seconds for each in of_ranks)
    sums = _sums(library, of_ranks)
    return MessageSize(
        from_bytes=1 << size,
        below_bytes=2 << size,
        bytes_per_s=sums["num_bytes"] / max(seconds, 1e-9),
        **sums,
    )


def _sums(library: str, of_ranks: Sequence[CallTotals]) -> dict[str, Any]:
    return {
        "library": library,
        "num_calls": sum(each.num_calls for each in of_ranks),
        "num_bytes": sum(each.num_bytes for each in of_ranks),
        "time": Seconds.over([each.seconds for each in of_ranks]),
    }
