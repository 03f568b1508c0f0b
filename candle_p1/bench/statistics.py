"""What repeated measurements say: their median, and how far it can be trusted."""

from __future__ import annotations

import statistics
from math import comb
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE = 0.95
MIN_VALUES = 6
"""With fewer values even their whole range covers the median with a probability below 95 %."""


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns a 95 % confidence interval of the median, whatever the distribution.

    It goes from the k-th smallest to the k-th largest value. The median of the distribution lies
    outside with probability 2 P(B < k), where B is binomial(len(values), 1/2); k is the largest
    for which this is at most 5 %. See Le Boudec, *Performance Evaluation of Computer and
    Communication Systems*, 2.2.

    Returns:
        The ends; None of fewer than MIN_VALUES values.
    """
    num = len(values)
    k = 0
    outside = 2 * comb(num, k) / 2**num
    while outside <= 1 - CONFIDENCE:
        k += 1
        outside += 2 * comb(num, k) / 2**num
    if k == 0:
        return None
    ordered = sorted(values)
    return ordered[k - 1], ordered[-k]


def summarize(seconds: Sequence[float]) -> dict[str, Any]:
    """Returns median, interval, range and raw values of repeated times, in s.

    The interval, ``ci95_s``, is None of fewer than MIN_VALUES repeats.
    """
    interval = median_interval(seconds)
    return {
        "median_s": statistics.median(seconds),
        "ci95_s": list(interval) if interval else None,
        "range_s": [min(seconds), max(seconds)],
        "repeats_s": list(seconds),
        "repeats": len(seconds),
    }
