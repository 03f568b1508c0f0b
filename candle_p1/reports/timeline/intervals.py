"""Intervals of time in whole microseconds: their union, and what two unions have in common.

Tensors that Horovod fuses each log the same activity at nearly the same time, so a sum over tensors
counts it many times. What an activity took is the length of the union of its intervals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Interval = tuple[int, int]
"""Begin and end, in µs; the end is not before the begin."""


class RunningUnion:
    """The union of intervals whose begins and ends come in the order of time.

    Takes constant memory: a piece of the union is complete when no interval is open, and is handed
    on.

    Args:
        on_piece: Called with the begin and end of each complete piece. Pieces do not overlap, and
            come in the order of time.

    Attributes:
        total_us: The length of the complete pieces.
        num_intervals: Begun so far.
        num_open: Begun and not ended.
        first_us: Where the first begins; None before that.
        last_us: The latest end.
    """

    __slots__ = (
        "_begin_us",
        "_on_piece",
        "first_us",
        "last_us",
        "num_intervals",
        "num_open",
        "total_us",
    )

    def __init__(self, on_piece: Callable[[int, int], None] | None = None) -> None:
        self.total_us = 0
        self.num_intervals = 0
        self.num_open = 0
        self.first_us: int | None = None
        self.last_us: int | None = None
        self._begin_us = 0
        self._on_piece = on_piece

    def begin(self, us: int) -> None:
        """Begins an interval."""
        if not self.num_open:
            self._begin_us = us
            if self.first_us is None:
                self.first_us = us
        self.num_open += 1
        self.num_intervals += 1

    def end(self, us: int) -> None:
        """Ends one of the intervals that are open; where none is, nothing happens."""
        if not self.num_open:
            return
        self.num_open -= 1
        self.last_us = us
        if not self.num_open:
            self.total_us += us - self._begin_us
            if self._on_piece:
                self._on_piece(self._begin_us, us)

    def end_all(self, us: int) -> None:
        """Ends all that are open, where the record of events stops."""
        while self.num_open:
            self.end(us)


class Overlap:
    """What intervals that come in the order of time have in common with given ones.

    Args:
        others: In any order; they may overlap.

    Attributes:
        total_us: The length in common so far.
    """

    def __init__(self, others: Iterable[Interval]) -> None:
        self._others = merge(others)
        self._next = 0
        self.total_us = 0

    def add(self, begin_us: int, end_us: int) -> None:
        """Adds an interval that begins no earlier than the one before ended."""
        others, i = self._others, self._next
        while i < len(others) and others[i][1] <= begin_us:
            i += 1
        self._next = i
        while i < len(others) and others[i][0] < end_us:
            self.total_us += min(end_us, others[i][1]) - max(begin_us, others[i][0])
            i += 1


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union as disjoint intervals in the order of time; empty ones are left out."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def subtract(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Returns what of a union lies outside another, as disjoint intervals in the order of time.

    ``subtract(steps, exposed)`` is when a rank computes, if `exposed` is when it does nothing but
    wait for communication.
    """
    left: list[Interval] = []
    holes, i = merge(others), 0
    for begin, end in merge(intervals):
        while i < len(holes) and holes[i][1] <= begin:
            i += 1
        j = i
        while j < len(holes) and holes[j][0] < end:
            left.append((begin, holes[j][0]))
            begin = holes[j][1]
            j += 1
        left.append((begin, end))
    return [(begin, end) for begin, end in left if end > begin]


def total_us(intervals: Sequence[Interval]) -> int:
    """Returns the length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
