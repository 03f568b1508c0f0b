"""What a timeline says about every moment, in as many pieces as a figure can show."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from candle_p1.reports.timeline.activities import LIBRARY_OPERATIONS, Activity, classify
from candle_p1.reports.timeline.broadcast import BroadcastOverhead, InitialBroadcast
from candle_p1.reports.timeline.events import US_PER_S, EventReader, origin_epoch_us
from candle_p1.reports.timeline.intervals import RunningUnion

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

NUM_PIECES = 1024
SHOWN = frozenset(LIBRARY_OPERATIONS.values())
"""The operations that Horovod has; a file from elsewhere may name any number of others."""


@dataclass(slots=True)
class CoverageUnion(RunningUnion):
    """The union of intervals, and how much of every piece of time it covers.

    Time from 0 on is divided into NUM_PIECES pieces. Where an interval ends after the last of them,
    pairs of pieces become one, so a timeline of any length fits into the same memory.

    Attributes:
        piece_us: The length of a piece.
        covered_us: How much of each piece is covered, up to the last time at which no interval was
            open.
    """

    piece_us: int = 1000
    covered_us: list[int] = field(default_factory=lambda: [0] * NUM_PIECES)

    def end(self, us: int) -> None:
        """Ends one of the open intervals; does nothing where none is open."""
        if self.num_open == 1:
            self._cover(max(self._begin_us, 0), max(us, 0))
        RunningUnion.end(self, us)

    def _cover(self, begin_us: int, end_us: int) -> None:
        while end_us > NUM_PIECES * self.piece_us:
            pairs = zip(self.covered_us[::2], self.covered_us[1::2], strict=True)
            self.covered_us = [a + b for a, b in pairs] + [0] * (NUM_PIECES // 2)
            self.piece_us *= 2
        length_us, covered_us = self.piece_us, self.covered_us
        first, last = begin_us // length_us, end_us // length_us
        if first == last:
            covered_us[first] += end_us - begin_us
            return
        covered_us[first] += (first + 1) * length_us - begin_us
        for i in range(first + 1, last):
            covered_us[i] += length_us
        if last < NUM_PIECES:
            covered_us[last] += end_us - last * length_us

    @property
    def shares(self) -> NDArray[np.float64]:
        """The covered share of each piece, from 0 to 1, float64, shape (NUM_PIECES,)."""
        return np.array(self.covered_us, np.float64) / self.piece_us


class CommunicationRow(NamedTuple):
    """One of the activities that the paper's figures of a timeline show.

    Attributes:
        operation: allreduce, broadcast, ...
        kind: "negotiate", the operation itself, or "transfer" by a library, see `Activity`.
        library: The library that transfers; else "".
    """

    operation: str
    kind: str
    library: str


@dataclass(frozen=True)
class Coverage:
    """Communication over the time of a timeline, whose clock counts seconds since hvd.init.

    Attributes:
        rows: The activities that occur.
        broadcast: The initial broadcast; None without one.
        origin_epoch_us: The time of day at which the clock was 0; None where the file lacks it.
        end_s: When the last event is.
        cut: Whether the file is truncated.
    """

    rows: dict[CommunicationRow, CoverageUnion]
    broadcast: BroadcastOverhead | None
    origin_epoch_us: int | None
    end_s: float
    cut: bool


def read_coverage(path: Path) -> Coverage:
    """Reads a timeline once, in memory that does not grow with its length.

    Raises:
        DataError: The file cannot be read or is not a timeline.
    """
    unfinished: dict[int, list[Activity]] = defaultdict(list)
    rows: dict[CommunicationRow, CoverageUnion] = defaultdict(CoverageUnion)
    broadcast = InitialBroadcast()
    origin_us: int | None = None
    us = 0
    reader = EventReader(path)
    for event in reader:
        phase = event["ph"]
        if phase == "M":
            origin_us = origin_epoch_us(event) if origin_us is None else origin_us
            continue
        us = max(us, event["ts"])
        if phase == "B":
            activity = classify(event["name"])
            unfinished[event["pid"]].append(activity)
            broadcast.begin(activity, us)
            if activity.operation in SHOWN:
                rows[_row(activity)].begin(us)
        elif phase == "E" and unfinished[event["pid"]]:
            activity = unfinished[event["pid"]].pop()
            broadcast.end(activity, us)
            if activity.operation in SHOWN:
                rows[_row(activity)].end(us)
    for row in rows.values():
        row.end_all(us)
    overhead = broadcast.overhead(us)
    return Coverage(dict(rows), overhead, origin_us, us / US_PER_S, reader.cut)


def _row(activity: Activity) -> CommunicationRow:
    assert activity.operation is not None
    return CommunicationRow(activity.operation, activity.kind, activity.library or "")
