import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from candle_p1.bench.checkpoint import daly_interval_s, expected_ratio, young_interval_s


def best_interval_s(cost_s, mtbf_s):
    """Returns where `expected_ratio` is smallest: (1 - x) exp(x) = exp(-C / M) with x = T / M."""
    return mtbf_s * brentq(lambda x: (1 - x) * math.exp(x) - math.exp(-cost_s / mtbf_s), 0, 1)


@given(st.floats(1e-3, 1e4), st.floats(1.0, 1e8), st.floats(0.0, 1e3))
def test_no_interval_costs_less_than_the_best_one(cost_s, mtbf_s, restart_s):
    daly = expected_ratio(daly_interval_s(cost_s, mtbf_s), cost_s, mtbf_s, restart_s)
    young = expected_ratio(young_interval_s(cost_s, mtbf_s), cost_s, mtbf_s, restart_s)
    assert min(daly, young) > 1
    if cost_s / mtbf_s > 1e-6:
        best_s = best_interval_s(cost_s, mtbf_s)
        best = expected_ratio(best_s, cost_s, mtbf_s, restart_s)
        assert best <= min(daly, young) * (1 + 1e-6)
        if cost_s < mtbf_s / 2:  # Daly claims his estimate for these
            assert daly_interval_s(cost_s, mtbf_s) == pytest.approx(best_s, rel=1e-2)
            assert daly <= best * 1.001


def test_formulas_as_published():
    # A checkpoint of a minute and a failure a day: sqrt(2 * 60 * 86400).
    assert young_interval_s(60, 86_400) == pytest.approx(3219.94, abs=0.01)
    assert daly_interval_s(2.0, 1.0) == 1.0
    ratios = [expected_ratio(600, 2, 86_400, restart_s) for restart_s in (0, 60)]
    assert ratios[0] == pytest.approx(1 + 2 / 600 + 300 / 86_400, rel=1e-3)  # to first order
    assert ratios[1] / ratios[0] == pytest.approx(math.exp(60 / 86_400))
    assert expected_ratio(1e6, 1, 1, 0) == expected_ratio(1, 1, 1, 1e6) == math.inf
