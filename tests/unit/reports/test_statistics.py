import itertools
import statistics
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.reports.statistics import (
    Estimate,
    cell,
    estimate_mean,
    estimate_median,
    estimate_ratio,
    number,
    summarize,
)

TIMES = st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("num", "ends", "confidence"),
    [
        (1, (1, 1), 0), (2, (1, 2), 0.5), (5, (1, 5), 0.9375),  # their range
        (6, (1, 6), 0.96875), (9, (2, 8), 0.9609375), (20, (6, 15), 0.958611),
    ],
)  # fmt: skip
def test_the_interval_of_a_median_agrees_with_published_tables(num, ends, confidence):
    estimate = estimate_median(range(1, num + 1))
    assert (estimate.low, estimate.high) == ends
    assert estimate.confidence == pytest.approx(confidence, rel=1e-6)
    assert estimate.is_confident == (confidence > 0.95)


@given(TIMES)
def test_the_interval_holds_the_median_and_lies_in_the_range(times):
    summary = summarize(times)
    low, high = summary["ci95_s"] or summary["range_s"]
    assert min(times) <= low <= statistics.median(times) <= high <= max(times)
    assert summary["repeats"] == len(summary["repeats_s"]) == len(times)


@pytest.mark.parametrize(("num_x", "num_y"), [(2, 2), (3, 4), (5, 5), (4, 7)])
def test_the_interval_of_a_ratio_misses_as_often_as_it_says(num_x, num_y):
    """Of sets that differ by no factor all orders are equally likely."""
    values = np.exp(np.arange(num_x + num_y) ** 1.3)  # no two ratios are alike
    misses = 0
    for chosen in itertools.combinations(range(num_x + num_y), num_x):
        others = [i for i in range(num_x + num_y) if i not in chosen]
        estimate = estimate_ratio(values[list(chosen)], values[others])
        misses += not estimate.low <= 1 <= estimate.high
    assert 1 - misses / comb(num_x + num_y, num_x) == pytest.approx(estimate.confidence)


@pytest.mark.parametrize(("num", "critical"), [(4, 0), (5, 2), (8, 13), (20, 127)])
def test_the_interval_of_a_ratio_agrees_with_published_critical_values(num, critical):
    """Two-sided Mann-Whitney test at 5 %: no difference is rejected where U is at most this."""
    x = np.exp(np.arange(num))
    y = np.exp(np.pi * np.arange(num))
    ordered = np.sort((x[:, None] / y[None, :]).ravel())
    estimate = estimate_ratio(x, y)
    assert (estimate.low, estimate.high) == (ordered[critical], ordered[-1 - critical])
    assert estimate.is_confident


@given(TIMES, TIMES, st.floats(1e-3, 1e3))
def test_a_ratio_scales_and_inverts_with_its_sets(x, y, factor):
    estimate, turned = estimate_ratio(x, y), estimate_ratio(y, x)
    scaled = estimate_ratio([factor * value for value in x], y)
    ends = np.array([estimate.low, estimate.value, estimate.high])
    assert ends == pytest.approx(np.sort(ends))
    assert [scaled.low, scaled.value, scaled.high] == pytest.approx(factor * ends)
    assert [turned.high, turned.value, turned.low] == pytest.approx(1 / ends)
    assert estimate.confidence == scaled.confidence == pytest.approx(turned.confidence)


def test_numbers_have_three_digits_and_four_after_a_one():
    texts = {
        41.234: "41.2", 12.345: "12.35", 0.012345: "0.0123", 1.0: "1.000", 0.0: "0",
        12345.6: "12,346", 0.98765: "0.988", 0.0063: "0.0063", 0.00042: "0.00042",
        -0.0000123: "-0.000012",
    }  # fmt: skip
    assert [number(value) for value in texts] == list(texts.values())
    assert (number(-0.0), number(float("nan"))) == ("0", "not a number")


def test_cells_show_the_kind_of_interval():
    estimates = {
        "1.000": estimate_median([1.0]),
        "2.50 [2.00 to 3.00]": estimate_median([2.0, 3.0]),
        "2.00 (2.00 to 2.00)": estimate_median([2.0] * 6),
        "2.00 [2.00 to 2.00; 90 %]": estimate_ratio([2.0] * 3, [1.0] * 3),
        "0.500 (0.0 to 20.0)": Estimate(0.5, -0.001, 20.0, 0.95, (6,)),
    }
    assert [cell(estimate) for estimate in estimates.values()] == list(estimates)


def test_the_mean_of_repeats_and_of_folds():
    repeats = estimate_mean([0.8, 0.9, 1.0])
    assert (repeats.value, repeats.num, repeats.is_confident) == (pytest.approx(0.9), (3,), True)
    # t(0.975; 2) = 4.302653, s = 0.1
    assert repeats.high - repeats.value == pytest.approx(4.302653 * 0.1 / 3**0.5)
    folds = estimate_mean([0.8, 0.9, 1.0], num_folds=3)
    assert folds.value - folds.low == pytest.approx(4.302653 * 0.1 * (1 / 3 + 1 / 2) ** 0.5)
    assert estimate_mean([0.8]) is None
