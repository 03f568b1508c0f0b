"""Times of one process: related to the time of day, and the union of intervals."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_READINGS = 10


class ClockAnchor(NamedTuple):
    """The time of day, in µs since 1970, and a process's time.perf_counter at the same moment."""

    epoch_us: int
    perf_counter_s: float


def read_anchor() -> ClockAnchor:
    """Reads both clocks several times, and returns the readings that are closest together."""
    readings = []
    for _ in range(NUM_READINGS):
        before_ns = time.perf_counter_ns()
        epoch_ns = time.time_ns()
        readings.append((time.perf_counter_ns() - before_ns, before_ns, epoch_ns))
    lasted_ns, before_ns, epoch_ns = min(readings)
    return ClockAnchor(epoch_ns // 1000, (before_ns + lasted_ns / 2) / 1e9)


def union(intervals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the pieces, in order, of which the union of intervals consists.

    Both are begins and ends, float64, with the shapes (intervals, 2) and (pieces, 2). An interval
    that ends before it begins, by clocks that were read late, is empty.
    """
    begins, ends = intervals[np.argsort(intervals[:, 0])].T
    ends = np.maximum.accumulate(np.maximum(begins, ends))
    is_new = np.append(True, begins[1:] > ends[:-1])[: len(intervals)]
    is_last = np.append(is_new[1:], True)[: len(intervals)]
    return np.stack([begins[is_new], ends[is_last]], axis=1)


def length(intervals: NDArray[np.float64]) -> float:
    """Returns the sum of the lengths of intervals, shape (intervals, 2)."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())
