"""Latency and bandwidth from times of messages: Hockney's model, in pieces.

Hockney's model is T = latency + bytes / bandwidth. Libraries change their protocol or algorithm
with the size (eager messages and rendezvous, trees and rings), and memory is slower than caches, so
one line seldom holds from 4 B to 1 GiB. Where it does not, the sizes are divided into few ranges
with a line each. The latency is then that of the smallest sizes, and the bandwidth that of the
largest. The lines of larger sizes may begin below 0: a link that lets a burst pass takes
(bytes - burst) / bandwidth. Where they cannot be told from lines through 0, they are these, since
otherwise sizes that lie close together would leave their slope open.

Residuals are relative, because times differ by orders of magnitude: a fit minimises the sum of
((model - time) / time)^2.

R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel
Computing 20(3), 1994.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MIN_SIZES = 3
"""A line has two parameters, so fewer sizes leave nothing to estimate its error from."""
LEAST_SPAN = 2
"""The sizes of a range differ at least by this factor, so that their slope shows."""
MAX_RANGES = 4
LARGE_RESIDUAL = 0.05
"""A line that misses a time by more than this does not hold for its size."""


@dataclass(frozen=True)
class Line:
    """Hockney's model of a range of sizes.

    Attributes:
        first_bytes: The smallest size that it was fitted to.
        last_bytes: The largest one.
        num_sizes: How many sizes.
        latency_s: T at no bytes; not below 0 for the smallest sizes.
        latency_ci95_s: Its 95 % interval.
        bandwidth_bytes_per_s: The inverse slope; None if the time does not grow with the size.
        bandwidth_ci95_bytes_per_s: Its 95 % interval; an end is None where it is not bounded.
        largest_residual: The largest |model - time| / time.
    """

    first_bytes: int
    last_bytes: int
    num_sizes: int
    latency_s: float
    latency_ci95_s: tuple[float, float]
    bandwidth_bytes_per_s: float | None
    bandwidth_ci95_bytes_per_s: tuple[float | None, float | None]
    largest_residual: float

    def seconds(self, num_bytes: float) -> float:
        """Returns the time that the model gives a message."""
        rate = self.bandwidth_bytes_per_s
        return self.latency_s + (num_bytes / rate if rate else 0.0)


def fit_line(sizes: Sequence[int], seconds: Sequence[float], *, is_first: bool = True) -> Line:
    """Returns the line with the least sum of squared relative residuals.

    Its slope is not below 0, nor is its latency if it is the first: where the best line has such a
    parameter, it is the best of those for which one of them is 0. The latency of other lines is 0
    if the interval of the best one contains 0.

    Args:
        sizes: Sizes in bytes, in ascending order; at least two.
        seconds: Their times; all above 0.
        is_first: Whether there are no smaller sizes.
    """
    num_bytes, times = np.asarray(sizes, float), np.asarray(seconds, float)
    columns = np.stack([1 / times, num_bytes / times], axis=1)
    best, used = _solve(columns, [0, 1])
    if best[1] < 0 or (is_first and best[0] < 0):
        choices = [_solve(columns, [which]) for which in (0, 1)]
        best, used = min(choices, key=lambda found: _misfit(columns, found[0]))
    errors = _half_widths(columns, best, used)
    if not is_first and len(used) == 2 and abs(best[0]) < errors[0]:
        best, used = _solve(columns, [1])
        errors = _half_widths(columns, best, used)
    latency_s, slope = map(float, best)
    slopes = slope - float(errors[1]), slope + float(errors[1])
    return Line(
        int(num_bytes[0]),
        int(num_bytes[-1]),
        len(times),
        latency_s,
        (
            max(0.0 if is_first else -np.inf, latency_s - float(errors[0])),
            latency_s + float(errors[0]),
        ),
        1 / slope if slope > 0 else None,
        (_inverse(slopes[1]), _inverse(slopes[0])),
        float(np.abs(columns @ best - 1).max()),
    )


def fit_lines(sizes: Sequence[int], seconds: Sequence[float]) -> list[Line]:
    """Returns the lines of at most MAX_RANGES ranges of sizes, ascending.

    There are as few ranges as miss no time by more than LARGE_RESIDUAL, or the most if all do. Each
    of several has at least MIN_SIZES sizes that span LEAST_SPAN, and they are divided where the sum
    of squared relative residuals is least.

    Args:
        sizes: See `fit_line`.
        seconds: See `fit_line`.
    """
    num_sizes = len(sizes)

    @cache
    def fitted(begin: int, end: int) -> tuple[Line, float]:
        line = fit_line(sizes[begin:end], seconds[begin:end], is_first=begin == 0)
        pairs = zip(sizes[begin:end], seconds[begin:end], strict=True)
        return line, sum((line.seconds(size) / time - 1) ** 2 for size, time in pairs)

    lines: list[Line] = []
    for num_ranges in range(1, max(1, min(MAX_RANGES, num_sizes // MIN_SIZES)) + 1):
        divisions = [
            list(pairwise((0, *inner, num_sizes)))
            for inner in combinations(range(1, num_sizes), num_ranges - 1)
        ]
        if num_ranges > 1:
            divisions = [each for each in divisions if _are_long_enough(each, sizes)]
        if not divisions:
            break
        best = min(divisions, key=lambda each: sum(fitted(*ends)[1] for ends in each))
        lines = [fitted(*ends)[0] for ends in best]
        if all(line.largest_residual <= LARGE_RESIDUAL for line in lines):
            break
    return lines


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> dict[str, Any] | None:
    """Returns the parameters of an operation for ``--json``; None for fewer than MIN_SIZES sizes.

    `latency_s` is that of the first range, `bandwidth_bytes_per_s` that of the last one,
    `measured_bytes_per_s` the median of bytes / time over the sizes from 1 / LEAST_SPAN of the
    largest on, and `largest_residual` that of all ranges. `one_line_residual` is the largest
    relative error of latency + bytes / bandwidth with these two over all sizes.

    Args:
        sizes: See `fit_line`.
        seconds: See `fit_line`.
    """
    if len(sizes) < MIN_SIZES:
        return None
    lines = fit_lines(sizes, seconds)
    first, last = lines[0], lines[-1]
    large = [i for i, size in enumerate(sizes) if LEAST_SPAN * size >= sizes[-1]]
    rate = last.bandwidth_bytes_per_s
    model = first.latency_s + (np.asarray(sizes, float) / rate if rate else 0.0)
    return {
        "latency_s": first.latency_s,
        "latency_ci95_s": list(first.latency_ci95_s),
        "bandwidth_bytes_per_s": rate,
        "bandwidth_ci95_bytes_per_s": list(last.bandwidth_ci95_bytes_per_s),
        "measured_bytes_per_s": median(sizes[i] / seconds[i] for i in large),
        "largest_residual": max(line.largest_residual for line in lines),
        "one_line_residual": float(np.abs(model / np.asarray(seconds) - 1).max()),
        "first_bytes": first.first_bytes,
        "last_bytes": last.last_bytes,
        "ranges": [asdict(line) for line in lines],
    }


def _are_long_enough(ranges: Sequence[tuple[int, int]], sizes: Sequence[int]) -> bool:
    return all(
        end - begin >= MIN_SIZES and sizes[end - 1] >= LEAST_SPAN * sizes[begin]
        for begin, end in ranges
    )


def _solve(columns: Floats, used: list[int]) -> tuple[Floats, list[int]]:
    """Returns the least-squares solution for ones on the right, with only some parameters."""
    chosen = columns[:, used]
    scale = np.linalg.norm(chosen, axis=0)  # latencies and slopes differ by many orders
    found = np.zeros(2)
    found[used] = np.linalg.lstsq(chosen / scale, np.ones(len(columns)), rcond=None)[0] / scale
    return found, used


def _misfit(columns: Floats, found: Floats) -> float:
    return float(np.square(columns @ found - 1).sum())


def _half_widths(columns: Floats, best: Floats, used: list[int]) -> Floats:
    """Returns the half widths of the 95 % intervals; 0 where a parameter was set to 0."""
    degrees = len(columns) - len(used)
    widths = np.zeros(2)
    if degrees < 1:
        return np.where(np.isin(np.arange(2), used), np.inf, 0.0)
    from scipy.stats import t

    chosen = columns[:, used]
    scale = np.linalg.norm(chosen, axis=0)
    inverse = np.linalg.pinv((chosen / scale).T @ (chosen / scale))
    variance = _misfit(columns, best) / degrees
    widths[used] = t.ppf(0.975, degrees) * np.sqrt(variance * np.diag(inverse)) / scale
    return widths


def _inverse(slope: float) -> float | None:
    return 1 / slope if 0 < slope < np.inf else None
