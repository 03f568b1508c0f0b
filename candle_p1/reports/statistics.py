"""Estimates from repeated measurements: medians and ratios with their confidence intervals.

No distribution is assumed, except of means. Intervals depend only on the order of the values: the
sign test for a median, the Mann-Whitney test for the ratio of two sets. Where there are too few
values for a confidence of 95 %, the widest interval is given, with the confidence that it has.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import comb, floor, isfinite, sqrt
from pathlib import Path
from typing import Any

from candle_p1.toml_file import read_toml

CONFIDENCE = 0.95
NOT_SIGNIFICANT, TOO_FEW = "not significant", "too few runs"
MIN_VALUES = 6
"""With fewer values, even their whole range covers the median with a probability below 95 %."""


@dataclass(frozen=True)
class Estimate:
    """A quantity estimated from repeated measurements, with the ends of its interval.

    Attributes:
        confidence: A lower bound of the probability with which such an interval covers the true
            value; below CONFIDENCE where there are too few values, 0 for a single one.
        num: The number of values behind it; for a ratio, of each set.
    """

    value: float
    low: float
    high: float
    confidence: float
    num: tuple[int, ...]

    @property
    def is_confident(self) -> bool:
        """Whether the interval has a confidence of 95 % or more."""
        return self.confidence >= CONFIDENCE

    def excludes(self, value: float) -> bool:
        """Returns whether a value lies outside the interval, and this has a confidence of 95 %."""
        return self.is_confident and not self.low <= value <= self.high

    def claim(self, same: float, higher: str, lower: str) -> str:
        """Returns on which side of `same` a 95 % interval lies, else NOT_SIGNIFICANT or TOO_FEW."""
        if not self.excludes(same):
            return NOT_SIGNIFICANT if self.is_confident else TOO_FEW
        return higher if self.value > same else lower

    def map(self, function: Callable[[float], float]) -> Estimate:
        """Returns the estimate of a monotone function of the quantity."""
        ends = sorted((function(self.low), function(self.high)))
        return replace(self, value=function(self.value), low=ends[0], high=ends[1])


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns a 95 % confidence interval of the median; None for fewer than MIN_VALUES values."""
    found = estimate_median(values)
    return (found.low, found.high) if found.is_confident else None


def estimate_median(values: Sequence[float]) -> Estimate:
    """Returns the median of at least one value, with an interval for any distribution.

    It extends from the k-th smallest to the k-th largest value. The median of the distribution lies
    outside with probability 2 P(B < k), where B is binomial(len(values), 1/2); k is the largest
    for which this is at most 5 %, or 1 for fewer values than MIN_VALUES. See Le Boudec,
    *Performance Evaluation of Computer and Communication Systems*, 2.2.
    """
    num, ordered = len(values), sorted(values)
    outcomes = [comb(num, below) for below in range(num // 2 + 1)]
    return _estimate(statistics.median(ordered), ordered, outcomes, 2**num, (num,))


def estimate_mean(values: Sequence[float], num_folds: int = 0) -> Estimate | None:
    """Returns the mean of repeats with Student's interval; None for fewer than two values.

    Values of cross-validation are not independent, because folds share training samples. For them,
    the variance of the mean, s^2 / n, becomes s^2 (1 / n + 1 / (K - 1)), where the second summand
    is the ratio of the samples held out to those trained on. See Nadeau and Bengio, "Inference for
    the Generalization Error", Machine Learning 52 (2003), section 3.

    Args:
        values: One for each repeat or fold, of distributions that are about normal.
        num_folds: K; 0 for repeats with all training samples.
    """
    num = len(values)
    if num < 2:
        return None
    from scipy.stats import t

    ratio = 1 / (num_folds - 1) if num_folds else 0.0
    deviation = statistics.stdev(values) * sqrt(1 / num + ratio)
    half = float(t.ppf((1 + CONFIDENCE) / 2, num - 1)) * deviation
    mean = statistics.fmean(values)
    return Estimate(mean, mean - half, mean + half, CONFIDENCE, (num,))


def estimate_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate:
    """Returns by which factor the values of one set are larger than those of another.

    The Hodges-Lehmann estimate on logarithms: the median of the ratios of all pairs, or the
    geometric mean of the two in the middle. Its interval extends from the k-th smallest to the k-th
    largest ratio; the true factor lies outside with probability 2 P(U < k), where U is the
    Mann-Whitney statistic of two sets of these sizes from one distribution; k is the largest for
    which this is at most 5 %. That takes 4 values against 4, or 3 against 5; 3 against 3 give 90 %.
    See Hollander, Wolfe and Chicken, *Nonparametric Statistical Methods*, 3rd edition, 4.2 and 4.3.
    All values are positive, and there is at least one in each set.
    """
    num = len(numerator), len(denominator)
    ratios = sorted(x / y for x in numerator for y in denominator)
    middle = sqrt(statistics.median_low(ratios) * statistics.median_high(ratios))
    return _between(ratios, middle, num)


def estimate_difference(minuend: Sequence[float], subtrahend: Sequence[float]) -> Estimate:
    """Returns by how much the values of one set are larger than those of another.

    Like `estimate_ratio`, but with differences, for quantities that may be 0.
    """
    num = len(minuend), len(subtrahend)
    differences = sorted(x - y for x in minuend for y in subtrahend)
    return _between(differences, statistics.median(differences), num)


def summarize(seconds: Sequence[float]) -> dict[str, Any]:
    """Returns median, interval (see `median_interval`), range and raw values of times, in s."""
    interval = median_interval(seconds)
    return {
        "median_s": statistics.median(seconds),
        "ci95_s": list(interval) if interval else None,
        "range_s": [min(seconds), max(seconds)],
        "repeats_s": list(seconds),
        "repeats": len(seconds),
    }


def _between(ordered: Sequence[float], value: float, num: tuple[int, int]) -> Estimate:
    """Returns the estimate of a shift between two sets from the differences of all pairs."""
    outcomes = _mann_whitney_counts(*sorted(num))[: (len(ordered) + 1) // 2]
    return _estimate(value, ordered, outcomes, comb(sum(num), num[0]), num)


def _estimate(
    value: float,
    ordered: Sequence[float],
    outcomes: Sequence[int],
    total: int,
    num: tuple[int, ...],
) -> Estimate:
    """Returns an estimate with the interval from the k-th smallest to the k-th largest value.

    It misses with probability 2 P(statistic < k); k is the largest for which that is at most
    1 - CONFIDENCE, or 1 where there is none. Of `total` outcomes, `outcomes` are the numbers of
    those in which the statistic is 0, 1, …, up to the middle.
    """
    k, inside = 1, outcomes[0]
    for count in outcomes[1:]:
        if 2 * (inside + count) > (1 - CONFIDENCE) * total:
            break
        k, inside = k + 1, inside + count
    return Estimate(value, ordered[k - 1], ordered[-k], max(1 - 2 * inside / total, 0.0), num)


@cache
def _mann_whitney_counts(num_x: int, num_y: int) -> tuple[int, ...]:
    """Returns how many orders of the values result in U = 0, 1, …, num_x num_y.

    The coefficients of the Gaussian binomial coefficient: the product over i = 1, …, num_x of
    (1 - q^(num_y + i)) / (1 - q^i), multiplied and divided as polynomials of q.
    """
    size = num_x * num_y + 1
    counts = [1] + [0] * (size - 1)
    for i in range(1, num_x + 1):
        for power in range(size - 1, num_y + i - 1, -1):
            counts[power] -= counts[power - num_y - i]
        for power in range(i, size):
            counts[power] += counts[power - i]
    return tuple(counts)


DIGITS = 3
MAX_DECIMALS = 4
"""Exceeded only where a number is so small that it would have fewer than two digits."""

NAME_LENGTH = 60
FORMULA = re.compile(r"(?![-+]?[\d.][-+.,e\d ]*$)[=+\-@\t\r]")
"""How text begins that spreadsheets take for a formula. Numbers are none."""


@cache
def contents() -> dict[str, Any]:
    """Returns contents.toml: titles, captions and explanations, which are described there."""
    return read_toml(Path(__file__).with_name("contents.toml"))


def number(value: float, like: float | None = None) -> str:
    """Returns a number with three or four significant digits, for example 12,345, 41.2 or 0.0123.

    Below 0.01 it has two. It gets the decimals of `like`, if that is given.
    """
    if not isfinite(value):
        return "not a number"
    text = f"{value:,.{_decimals(value if like is None else like)}f}"
    return text.removeprefix("-") if not float(text.replace(",", "")) else text


def percent(share: float) -> str:
    """Returns a share as a percentage."""
    return f"{100 * share:.0f} %"


def interval(estimate: Estimate, of: str = "run") -> str:
    """Returns the interval of an estimate for a sentence, with the noun for what it is made of."""
    runs = f"{' against '.join(map(str, estimate.num))} {of}{'s' * (estimate.num != (1,))}"
    if estimate.confidence == 0:
        return f"no interval, {runs}"
    ends = _ends(estimate)
    if estimate.is_confident:
        return f"95 % interval {ends}, {runs}"
    if len(estimate.num) == 1:
        return f"range {ends}, {runs}"
    return f"{floor(100 * estimate.confidence)} % interval {ends}, {runs}: too few for 95 %"


def cell(estimate: Estimate) -> str:
    """Returns an estimate for a table.

    (…) is a 95 % interval. […] is the range of the values of a median, or the widest interval of a
    ratio with its confidence. Neither means a single run.
    """
    value = number(estimate.value)
    if estimate.confidence == 0:
        return value
    ends = _ends(estimate)
    if estimate.is_confident:
        return f"{value} ({ends})"
    confidence = f"; {floor(100 * estimate.confidence)} %" if len(estimate.num) > 1 else ""
    return f"{value} [{ends}{confidence}]"


def _ends(estimate: Estimate) -> str:
    """Returns "a to b", with the decimals of the largest."""
    like = max(abs(estimate.value), abs(estimate.low), abs(estimate.high))
    return f"{number(estimate.low, like)} to {number(estimate.high, like)}"


def listed(items: Sequence[object]) -> str:
    """Returns items as "a", "a and b", "a, b and c"."""
    words = [f"{item:,}" if isinstance(item, int) else str(item) for item in items]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def file_name(words: str) -> str:
    """Returns words from a record as a part of a file name, of letters, digits, "-" and "."."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-.")
    if len(name) > NAME_LENGTH:
        name = name[:NAME_LENGTH].rpartition("-")[0] or name[:NAME_LENGTH]
    return name.rstrip("-.") or "unnamed"


def csv_text(text: str) -> str:
    """Returns the text of a CSV cell, with an apostrophe before what would be a formula."""
    return f"'{text}" if FORMULA.match(text) else text


def _decimals(value: float) -> int:
    """Returns the decimals for three significant digits, or four where the first is a 1."""
    if value == 0 or not isfinite(value):
        return 0
    first, exponent = f"{abs(value):.{DIGITS - 1}e}".split("e")
    digits = DIGITS + first.startswith("1")
    return min(max(digits - 1 - int(exponent), 0), max(MAX_DECIMALS, 1 - int(exponent)))
