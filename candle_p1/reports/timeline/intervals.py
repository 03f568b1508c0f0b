"""The union of intervals of time, in whole microseconds.

Fused tensors each log the same activity at nearly the same time, so a sum over tensors would count
it many times. The time that an activity took is the length of the union of its intervals.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RunningUnion:
    """The union of intervals whose starts and ends arrive in order of time.

    Attributes:
        total_us: The length of the union, up to the last time at which no interval was open.
        num_intervals: Begun so far.
        num_open: Begun and not ended.
        first_us: When the first began; 0 before that.
        last_us: When the latest ended; 0 before that.
    """

    total_us: int = 0
    num_intervals: int = 0
    num_open: int = 0
    first_us: int = 0
    last_us: int = 0
    _begin_us: int = 0

    def begin(self, us: int) -> None:
        """Begins an interval."""
        if not self.num_intervals:
            self.first_us = us
        if not self.num_open:
            self._begin_us = us
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
