from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.bench.interval import daly_interval_s, expected_ratio, young_interval_s

costs_s = st.floats(1e-3, 1e4)
means_s = st.floats(1.0, 1e8)
restarts_s = st.floats(0.0, 1e3)


def best_interval_s(cost_s, mtbf_s):
    """Returns where `expected_ratio` is smallest: (1 - x) exp(x) = exp(-C / M) with x = T / M."""
    low, high = 0.0, 1.0
    for _ in range(100):
        x = (low + high) / 2
        if (1 - x) * math.exp(x) > math.exp(-cost_s / mtbf_s):
            low = x
        else:
            high = x
    return mtbf_s * high


def test_youngs_interval_is_the_published_formula():
    # A checkpoint of a minute and a failure a day: sqrt(2 * 60 * 86400).
    assert young_interval_s(60, 86_400) == pytest.approx(3219.94, abs=0.01)


@given(costs_s, means_s)
def test_dalys_interval_is_near_the_minimum_of_the_expected_time(cost_s, mtbf_s):
    found = daly_interval_s(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        assert found == mtbf_s
    elif 1e-6 < cost_s / mtbf_s < 0.5:  # Daly claims his estimate for checkpoints below M / 2
        assert found == pytest.approx(best_interval_s(cost_s, mtbf_s), rel=1e-2)


@given(costs_s, means_s, restarts_s)
def test_no_interval_costs_less_than_the_best_one(cost_s, mtbf_s, restart_s):
    best_s = best_interval_s(cost_s, mtbf_s) if cost_s / mtbf_s > 1e-6 else None
    daly = expected_ratio(daly_interval_s(cost_s, mtbf_s), cost_s, mtbf_s, restart_s)
    young = expected_ratio(young_interval_s(cost_s, mtbf_s), cost_s, mtbf_s, restart_s)
    assert daly > 1
    assert young > 1
    if best_s:
        best = expected_ratio(best_s, cost_s, mtbf_s, restart_s)
        assert best <= min(daly, young) * (1 + 1e-6)
        if cost_s < mtbf_s / 2:
            assert daly <= best * 1.001


def test_a_restart_is_a_cost_of_every_failure_and_no_ratio_overflows():
    ratios = [expected_ratio(600, 2, 86_400, restart_s) for restart_s in (0, 60)]
    assert ratios[0] == pytest.approx(1 + 2 / 600 + 300 / 86_400, rel=1e-3)  # to first order
    assert ratios[1] / ratios[0] == pytest.approx(math.exp(60 / 86_400))
    assert expected_ratio(1e6, 1, 1, 0) == expected_ratio(1, 1, 1, 1e6) == math.inf
