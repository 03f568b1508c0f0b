"""The communication of one rank: every collective by name, and messages by size.

As with phases, at most one log is active in a process; code that communicates reports to it through
`collective` or `note_collective`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from candle_p1.instrument import phases
from candle_p1.records.rank_stats import Seconds
from candle_p1.records.types import ClockWaitsFor, Collective, Communication, MessageSize


@dataclass
class CallTotals:
    """Totals over the calls of one operation, or over the messages of one size class.

    The bytes are those that this rank contributed; the time is that from contributing to having the
    result, of which each of several calls that overlap counts in full.
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
    """The communication of one rank: by library and operation, such as ("mpi", "allgather").

    `by_size` is by library and the binary logarithm of a message's bytes, rounded down; messages
    without bytes are left out.
    """

    by_name: dict[tuple[str, str], CallTotals] = field(default_factory=dict)
    by_size: dict[tuple[str, int], CallTotals] = field(default_factory=dict)

    def add(
        self, library: str, name: str, num_bytes: int, seconds: float, num_calls: int = 1
    ) -> None:
        """Adds calls of one message size, of `num_bytes` each; `seconds` is the time of all.

        The library is "mpi", or the name of a reducer.
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

    `count_bytes` returns the bytes that this rank contributes; called only if a log is active.
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
    logs: Sequence[CommunicationLog], *, clock_waits_for: ClockWaitsFor | None = None
) -> Communication:
    """Returns the collectives of all ranks as a run record holds them.

    A bandwidth is that of one rank: its bytes divided by its seconds, including the time it waited
    for others. `clock_waits_for` says how gradient allreduces were timed; None if none were.
    """
    names = list(dict.fromkeys(key for log in logs for key in log.by_name))
    sizes = sorted({key for log in logs for key in log.by_size})
    return Communication(
        clock_waits_for=clock_waits_for,
        collectives=[
            Collective(name=key[1], **_sums(key, [log.by_name for log in logs])) for key in names
        ],
        message_sizes=[
            MessageSize(
                from_bytes=1 << key[1],
                below_bytes=2 << key[1],
                bytes_per_s=sums["num_bytes"] / max(sums["time"].values.sum(), 1e-9),
                **sums,
            )
            for key in sizes
            for sums in [_sums(key, [log.by_size for log in logs])]
        ],
    )


def _sums(key: tuple[str, Any], of_ranks: Sequence[Mapping[Any, CallTotals]]) -> dict[str, Any]:
    """Returns the fields of Messages for what all ranks have under a key."""
    totals = [of_rank.get(key, CallTotals()) for of_rank in of_ranks]
    return {
        "library": key[0],
        "num_calls": sum(each.num_calls for each in totals),
        "num_bytes": sum(each.num_bytes for each in totals),
        "time": Seconds.over([each.seconds for each in totals]),
    }
