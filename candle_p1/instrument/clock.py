"""Relates time.perf_counter to the time of day, and thus to the clocks of other programs."""

from __future__ import annotations

import time
from dataclasses import dataclass

NUM_READINGS = 10


@dataclass(frozen=True)
class ClockAnchor:
    """The time of day and time.perf_counter of one process at the same moment.

    Attributes:
        epoch_us: The time of day, in µs since 1970.
        perf_counter_s: The value of time.perf_counter.
        uncertainty_us: How far apart the two readings may be.
    """

    epoch_us: int
    perf_counter_s: float
    uncertainty_us: float

    def to_perf_counter_s(self, epoch_us: int) -> float:
        """Returns the value of time.perf_counter at a time of day."""
        return self.perf_counter_s + (epoch_us - self.epoch_us) / 1e6


def read_anchor() -> ClockAnchor:
    """Reads both clocks several times, and returns the readings that are closest together."""
    anchors = []
    for _ in range(NUM_READINGS):
        before_ns = time.perf_counter_ns()
        epoch_ns = time.time_ns()
        after_ns = time.perf_counter_ns()
        middle_s = (before_ns + after_ns) / 2e9
        anchors.append(ClockAnchor(epoch_ns // 1000, middle_s, (after_ns - before_ns) / 2e3))
    return min(anchors, key=lambda anchor: anchor.uncertainty_us)
