"""The union of intervals of time, in whole microseconds.

Fused tensors each log the same activity at nearly the same time, so a sum over tensors would count
it many times. The time that an activity took is the length of the union of its intervals.
"""

from __future__ import annotations


class RunningUnion:
    """The union of intervals whose begins and ends arrive in the order of time.

    It needs constant memory.

    Attributes:
        total_us: The length of the union, up to the last time at which no interval was open.
        num_intervals: Begun so far.
        num_open: Begun and not ended.
        first_us: When the first began; None before that.
        last_us: When the latest ended; None before that.
    """

    __slots__ = ("_begin_us", "first_us", "last_us", "num_intervals", "num_open", "total_us")

    def __init__(self) -> None:
        self.total_us = 0
        self.num_intervals = 0
        self.num_open = 0
        self.first_us: int | None = None
        self.last_us: int | None = None
        self._begin_us = 0

    def begin(self, us: int) -> None:
        """Begins an interval."""
        if not self.num_open:
            self._begin_us = us
            if self.first_us is None:
                self.first_us = us
        self.num_open += 1
        self.num_intervals += 1

    def end(self, us: int) -> None:
        """Ends one of the open intervals; does nothing where none is open."""
        if not self.num_open:
            return
        self.num_open -= 1
        self.last_us = us
        if not self.num_open:
            self.total_us += us - self._begin_us

    def end_all(self, us: int) -> None:
        """Ends all open intervals, for instance where the timeline stops."""
        while self.num_open:
            self.end(us)
