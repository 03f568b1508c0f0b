from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.bench.statistics import MIN_VALUES, median_interval, summarize

TIMES = st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("num", "ranks"),
    [(1, None), (5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (12, (3, 10)), (20, (6, 15))],
)
def test_the_interval_is_that_of_the_published_tables(num, ranks):
    assert median_interval(range(1, num + 1)) == ranks
    assert (ranks is None) == (num < MIN_VALUES)


@pytest.mark.parametrize("num", [6, 7, 9, 15, 30])
@pytest.mark.parametrize("distribution", ["exponential", "normal"])
def test_the_interval_covers_the_median_as_often_as_it_says(num, distribution):
    random = np.random.default_rng(2019)
    median = {"exponential": np.log(2), "normal": 0.0}[distribution]
    samples = getattr(random, distribution)(size=(4000, num))
    intervals = np.array([median_interval(sample) for sample in samples])
    covered = ((intervals[:, 0] <= median) & (median <= intervals[:, 1])).mean()
    assert covered >= 0.95 - 3 * (0.95 * 0.05 / 4000) ** 0.5


@given(TIMES)
def test_the_interval_holds_the_median_and_lies_in_the_range(times):
    summary = summarize(times)
    low, high = summary["ci95_s"] or summary["range_s"]
    assert min(times) <= low <= statistics.median(times) <= high <= max(times)
    assert summary["repeats"] == len(summary["repeats_s"]) == len(times)


@given(TIMES, st.randoms(use_true_random=False))
def test_the_order_of_the_values_does_not_matter(times, random):
    shuffled = random.sample(times, len(times))
    assert median_interval(shuffled) == median_interval(times)
