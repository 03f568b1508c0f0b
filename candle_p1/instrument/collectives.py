"""What the ranks exchange: every collective by name, and messages by size.

As with phases, one log is at work in a process at a time, and who communicates tells it by
`collective` or `CommunicationLog.add`.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from candle_p1.instrument import phases
from candle_p1.records.record import over_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass
class Exchanges:
    """A kind of exchange, or a class of sizes, added up over its calls.

    Attributes:
        num_calls: How often.
        num_bytes: What this rank has given, all calls together.
        seconds: From giving to having the result, all calls together; calls that overlap in time
            count each.
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
    """The exchanges of one rank.

    Attributes:
        by_name: By library and name of the operation, such as ("mpi", "allgather").
        by_size: By library and the binary logarithm of a message's bytes, rounded down; of those
            that carry any.
    """

    by_name: dict[tuple[str, str], Exchanges] = field(default_factory=dict)
    by_size: dict[tuple[str, int], Exchanges] = field(default_factory=dict)

    def add(
        self, library: str, name: str, num_bytes: int, seconds: float, num_calls: int = 1
    ) -> None:
        """Adds calls of one message size.

        Args:
            library: "mpi" or "horovod".
            name: The operation, and what it is about.
            num_bytes: Of one call.
            seconds: Of all calls.
            num_calls: How many.
        """
        total = num_calls * num_bytes
        self.by_name.setdefault((library, name), Exchanges()).add(num_calls, total, seconds)
        if num_bytes:
            size = (library, num_bytes.bit_length() - 1)
            self.by_size.setdefault(size, Exchanges()).add(num_calls, total, seconds)


_log: CommunicationLog | None = None


@contextmanager
def at_work(log: CommunicationLog | None) -> Iterator[None]:
    """Makes a log the one that is told; None is none."""
    global _log
    before, _log = _log, log
    try:
        yield
    finally:
        _log = before


@contextmanager
def collective(library: str, name: str, count_bytes: Callable[[], int]) -> Iterator[None]:
    """Times an exchange for which this rank waits; for the phase now running too.

    Args:
        library: "mpi" or "horovod".
        name: The operation.
        count_bytes: Returns what this rank gives; is called only if a log is at work.
    """
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - begin
        note_exchange(library, name, 0 if _log is None else count_bytes(), seconds)


def note_exchange(library: str, name: str, num_bytes: int, seconds: float) -> None:
    """Tells the log, and the phase now running, of an exchange for which this rank has waited."""
    phases.add_communication(seconds)
    if _log is not None:
        _log.add(library, name, num_bytes, seconds)


def summarize_communication(logs: Sequence[CommunicationLog]) -> dict[str, Any]:
    """Returns the exchanges of all ranks as they stand in a run record.

    A bandwidth is that of one rank: its bytes by its seconds, in which it also waited for others.
    """
    return {
        "collectives": [
            {
                "library": library,
                "name": name,
                **_sums([log.by_name.get((library, name), Exchanges()) for log in logs]),
            }
            for library, name in dict.fromkeys(key for log in logs for key in log.by_name)
        ],
        "message_sizes": [
            {
                "library": library,
                "from_bytes": 1 << size,
                "below_bytes": 2 << size,
                **(sums := _sums([log.by_size.get((library, size), Exchanges()) for log in logs])),
                "bytes_per_s": sums["num_bytes"] / max(sum(sums["time"]["per_rank_s"]), 1e-9),
            }
            for library, size in sorted({key for log in logs for key in log.by_size})
        ],
    }


def _sums(of_ranks: Sequence[Exchanges]) -> dict[str, Any]:
    return {
        "num_calls": sum(each.num_calls for each in of_ranks),
        "num_bytes": sum(each.num_bytes for each in of_ranks),
        "time": over_ranks([each.seconds for each in of_ranks], "s"),
    }
