from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.bench.comm_report import MIN_SIZES, fit, fit_line

SIZES = [4**power for power in range(1, 16)]


def hockney(latency_s, rate, sizes=SIZES):
    return [latency_s + size / rate for size in sizes]


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12), st.integers(0, 2**32 - 1))
def test_noise_is_in_the_intervals_and_moves_the_parameters_little(latency_s, rate, seed):
    noise = np.random.default_rng(seed).uniform(0.97, 1.03, len(SIZES))
    found = fit(SIZES, list(noise * hockney(latency_s, rate)))
    assert len(found["ranges"]) == 1
    low, high = found["bandwidth_ci95_bytes_per_s"]
    assert low < found["bandwidth_bytes_per_s"]
    assert high is None or high > found["bandwidth_bytes_per_s"]
    if latency_s < SIZES[-3] / rate:  # the largest sizes show the bandwidth
        assert found["bandwidth_bytes_per_s"] == pytest.approx(rate, rel=0.05)
    if latency_s > SIZES[2] / rate:  # the smallest ones show the latency
        assert found["latency_s"] == pytest.approx(latency_s, rel=0.05)
    ends = found["latency_ci95_s"]
    assert 0 <= ends[0] <= found["latency_s"] <= ends[1]


def test_an_interval_covers_the_parameters_as_often_as_it_says():
    random, covered, num = np.random.default_rng(2), np.zeros(2), 400
    for _ in range(num):
        times = random.normal(1, 0.02, len(SIZES)) * hockney(1e-5, 1e9)
        line, _ = fit_line(SIZES, list(times))
        (low_s, high_s), (low, high) = line["latency_ci95_s"], line["bandwidth_ci95_bytes_per_s"]
        covered += [low_s <= 1e-5 <= high_s, low <= 1e9 <= high]
    assert all(0.92 <= share <= 0.98 for share in covered / num), covered / num


@pytest.mark.parametrize("cut", [5, 11])
def test_a_change_of_protocol_divides_the_sizes_where_it_is(cut):
    found = fit(SIZES, hockney(2e-6, 5e9, SIZES[:cut]) + hockney(3e-4, 1e9, SIZES[cut:]))
    assert [line["num_sizes"] for line in found["ranges"]] == [cut, len(SIZES) - cut]
    assert found["latency_s"] == pytest.approx(2e-6, rel=1e-6)
    assert found["bandwidth_bytes_per_s"] == pytest.approx(1e9, rel=1e-6)
    assert found["largest_residual"] < 1e-6 < found["one_line_residual"]


@given(st.lists(st.floats(1e-7, 1e3), min_size=3, max_size=15))
def test_every_size_is_in_one_range(times):
    found = fit(SIZES[: len(times)], times)
    numbers = [line["num_sizes"] for line in found["ranges"]]
    assert sum(numbers) == len(times)
    assert min(numbers) >= MIN_SIZES
    assert found["ranges"][0]["latency_s"] >= 0
    ends = [end for line in found["ranges"] for end in (line["first_bytes"], line["last_bytes"])]
    assert ends == sorted(ends)


def test_the_bandwidth_of_times_that_do_not_grow_is_not_known():
    found = fit(SIZES, [2e-6 - 1e-8 * i for i in range(len(SIZES))])
    assert found["bandwidth_bytes_per_s"] is None
    assert found["latency_s"] == pytest.approx(2e-6, rel=0.1)
    line, _ = fit_line([1, 2, 4], [1.0, 2.2, 4.8])  # the latency is not negative
    assert (line["latency_s"], line["bandwidth_bytes_per_s"]) == pytest.approx((0, 0.88), rel=0.05)
    assert fit(SIZES[:2], [1, 2]) is None


def test_sizes_that_lie_close_together_give_a_bandwidth_with_an_interval():
    """With a latency, three noisy sizes would leave the slope open."""
    sizes = [size << 20 for size in (64, 128, 256, 384, 512, 768, 1024)]
    rates = np.array([3.5e9] * 4 + [1.9e9] * 3) * [1, 1.01, 0.99, 1, 1.1, 0.98, 1.02]
    times = [1e-3 * (1 << 20) / size + size / rate for size, rate in zip(sizes, rates, strict=True)]
    found = fit(sizes, times)
    assert [line["num_sizes"] for line in found["ranges"]] == [4, 3]
    assert found["ranges"][-1]["latency_s"] == 0
    low, high = found["bandwidth_ci95_bytes_per_s"]
    assert 1.5e9 < low < found["bandwidth_bytes_per_s"] < high < 2.6e9
    assert found["measured_bytes_per_s"] == pytest.approx(1.94e9, rel=0.01)


@pytest.mark.parametrize(("last", "num_ranges"), [(10, 1), (16, 2)])
def test_a_range_spans_a_factor_of_two(last, num_ranges):
    sizes = [size << 20 for size in (1, 2, 4, 8, 9, last)]
    times = [size / rate for size, rate in zip(sizes, [1e9] * 3 + [5e9] * 3, strict=True)]
    assert len(fit(sizes, times)["ranges"]) == num_ranges
