from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from candle_p1.instrument.power.sampler import Counter
from candle_p1.instrument.power.source import SensorError
from candle_p1.records.power_trace import Channel, Trace, add

COUNTER = Channel("package-0", "package 0", "cpu", "rapl", "energy", 1.0, None, 1000.0, 0.001)
GAUGE = Channel("gpu:GPU-1", "H100", "gpu", "nvml", "power")
HZ = 10.0

POWERS_W = st.lists(st.floats(1, 1000), min_size=1, max_size=8)
SHARES = st.lists(st.floats(0, 1), max_size=5)


def sampled(channel, function, duration_s, hz=HZ, start_s=0.0):
    """Returns what a sensor reads of a power or of an energy that is a function of time."""
    times_s = start_s + np.arange(int(duration_s * hz) + 1) / hz
    return Trace(channel, times_s, np.array([function(t) for t in times_s], float), 1 / hz)


def without(trace, begin_s, end_s):
    """Returns a trace without the samples in a time."""
    kept = (trace.times_s < begin_s) | (trace.times_s > end_s)
    return Trace(trace.channel, trace.times_s[kept], trace.values[kept], trace.interval_s)


def steps_w(time_s):
    """The power of idling, loading, training and evaluating: 60 + 120 + 600 + 300 W."""
    return [60.0, 120.0, 600.0, 300.0][min(int(time_s // 15.03), 3)]


def steps_j(time_s):
    energy_j = 0.0
    for k in range(4):
        inside_s = min(max(time_s - 15.03 * k, 0.0), 15.03 if k < 3 else np.inf)
        energy_j += inside_s * [60.0, 120.0, 600.0, 300.0][k]
    return energy_j


@pytest.mark.parametrize(
    ("channel", "function"), [(GAUGE, steps_w), (COUNTER, steps_j)], ids=["power", "energy"]
)
def test_a_piecewise_power_is_integrated_within_a_tenth_of_a_percent(channel, function):
    trace = sampled(channel, function, 60.1)
    found = trace.energy(0, 60.1)
    assert found.energy_j == pytest.approx(steps_j(60.1), rel=1e-3)
    assert (found.kind, found.num_samples, found.few_samples) == ("measured", 602, False)
    assert found.mean_w == pytest.approx(steps_j(60.1) / 60.1, rel=1e-3)
    # Within a step nothing is lost, whatever the place of the samples.
    assert trace.energy(31.234, 44.567).energy_j == pytest.approx(600 * 13.333)


@given(POWERS_W, st.integers(5, 50))
def test_lines_between_samples_are_integrated_exactly(powers_w, samples_per_line):
    knots_s = np.arange(len(powers_w) + 1, dtype=float)
    powers_w = [*powers_w, powers_w[0]]
    trace = sampled(
        GAUGE, lambda t: np.interp(t, knots_s, powers_w), len(powers_w) - 1, hz=samples_per_line
    )
    exact_j = np.sum((np.array(powers_w[1:]) + powers_w[:-1]) / 2)
    assert trace.energy(0, trace.times_s[-1]).energy_j == pytest.approx(exact_j)


@given(POWERS_W, SHARES, st.sampled_from([GAUGE, COUNTER]), st.floats(-1e6, 1e6))
def test_energies_of_phases_add_up_to_that_of_the_run(powers_w, shares, channel, start_s):
    function = dict(zip(range(len(powers_w)), powers_w, strict=True))
    trace = sampled(
        channel,
        lambda t: function[min(int(t - start_s), len(powers_w) - 1)],
        len(powers_w),
        start_s=start_s,
    )
    if channel is COUNTER:
        trace = Trace(channel, trace.times_s, np.cumsum(trace.values), trace.interval_s)
    begin_s, end_s = trace.times_s[0] - 0.05, trace.times_s[-1] + 0.05
    bounds_s = [begin_s, *sorted(begin_s + share * (end_s - begin_s) for share in shares), end_s]
    parts = list(pairwise(bounds_s))
    assume(all(end - begin > 1e-3 for begin, end in parts))
    total = trace.energy(begin_s, end_s)
    energies = [trace.energy(begin, end) for begin, end in parts]
    assert add(energies).energy_j == pytest.approx(total.energy_j, rel=1e-6)
    assert all(energy.energy_j > 0 for energy in energies)


def test_a_phase_shorter_than_three_samples_or_updates_of_the_sensor_is_marked():
    trace = sampled(COUNTER, lambda t: 100 * t, 10)
    short = trace.energy(1.05, 1.22)
    assert (short.kind, short.num_samples, short.few_samples) == ("estimated", 2, True)
    assert short.energy_j == pytest.approx(17)
    assert not trace.energy(1.05, 1.35).few_samples
    slow = Channel("node", "node", "node", "cray", "energy", resolution_s=0.1)
    trace = sampled(slow, lambda t: 100 * t, 10, hz=100)
    assert trace.energy(1, 1.2).few_samples
    assert not trace.energy(1, 1.4).few_samples


EVEN = [sampled(COUNTER, lambda t: 50 * t, 10), sampled(GAUGE, lambda t: 50, 10)]


@pytest.mark.parametrize("trace", EVEN)
def test_beyond_the_samples_an_energy_is_an_estimate_and_then_absent(trace):
    beyond = trace.energy(-0.09, 10.09)
    assert beyond.kind == "estimated"
    assert beyond.energy_j == pytest.approx(50 * 10.18)
    late, early = trace.energy(-0.11, 5), trace.energy(5, 10.11)
    assert (late.kind, late.energy_j, late.mean_w) == ("absent", None, None)
    assert "0.11 s" in late.reason
    assert "0.11 s" in early.reason


@pytest.mark.parametrize("trace", EVEN)
def test_in_a_short_gap_an_energy_is_an_estimate_and_mostly_in_a_gap_absent(trace):
    short = without(trace, 4.01, 4.79).energy(4.1, 4.6)
    assert (short.kind, short.few_samples) == ("estimated", True)
    assert short.energy_j == pytest.approx(25)
    missed = without(trace, 4.01, 7.99).energy(3.5, 6)
    assert (missed.kind, missed.energy_j) == ("absent", None)


def test_a_gap_makes_an_energy_an_estimate_for_power_but_not_for_a_counter():
    counter, gauge = (without(trace, 4.01, 5.99) for trace in EVEN)
    assert gauge.energy(0, 10).kind == "estimated"
    assert gauge.energy(0, 3.9).kind == gauge.energy(6.1, 9).kind == "measured"
    assert counter.energy(0, 10).kind == "measured"
    assert counter.energy(0, 10).energy_j == pytest.approx(500)
    assert counter.energy(0, 5).kind == "estimated"


def test_a_counter_that_does_not_change_is_absent_and_never_0():
    stuck = sampled(COUNTER, lambda t: 50 * min(t, 4), 20)
    assert stuck.energy(0, 3.9).energy_j == pytest.approx(195)
    for phase in ((0, 10), (10, 12), (10, 20), (0, 20)):
        found = stuck.energy(*phase)
        assert (found.kind, found.energy_j) == ("absent", None)
        assert "16 s" in found.reason


def test_a_counter_may_be_updated_less_often_than_it_is_read():
    node = Channel("node", "node", "node", "cray", "energy", resolution_s=0.1)
    trace = sampled(node, lambda t: 200 * np.floor(t * 10) / 10, 20, hz=50)
    assert trace.energy(2, 18).energy_j == pytest.approx(200 * 16, rel=1e-2)
    between = trace.energy(3.02, 3.08)
    assert (between.kind, between.energy_j) == ("absent", None)


def test_a_sensor_that_shows_no_power_is_absent():
    found = sampled(GAUGE, lambda t: 0, 10).energy(1, 9)
    assert (found.kind, found.energy_j) == ("absent", None)


def test_one_sample_or_no_time_gives_no_energy():
    one = Trace(GAUGE, np.array([1.0]), np.array([50.0]), 0.1, "from 1.1 s on: gone")
    assert one.energy(1, 1.05).reason == "from 1.1 s on: gone"
    assert sampled(GAUGE, lambda t: 50, 10).energy(3, 3).kind == "absent"


def test_energy_after_the_end_of_a_trace_is_absent_for_the_same_reason():
    ended = replace(EVEN[1], ended="from 10.1 s on: gone")
    assert ended.energy(0, 10).kind == "measured"
    assert ended.energy(5, 11).reason == "from 10.1 s on: gone"
    assert add([ended.energy(0, 5), ended.energy(8, 11)]).energy_j is None


# --- Counters -------------------------------------------------------------------------------------

MODULUS = 262_143_328_911
PACKAGE = Channel("package-0", "package 0", "cpu", "rapl", "energy", 1e-6, MODULUS, 2000.0, 0.001)


@given(
    st.lists(st.integers(1, 150_000_000), min_size=1, max_size=50),
    st.sampled_from([400_000_000, MODULUS]),
    st.floats(0, 1, exclude_max=True),
)
def test_wrap_around_is_exact(steps_uj, modulus, first):
    counter = Counter(replace(PACKAGE, modulus=modulus))
    counts = np.cumsum([int(first * modulus), *steps_uj], dtype=object)
    found = [counter.joules(0.1 * k, int(count) % modulus) for k, count in enumerate(counts)]
    assert found == [int(count) * 1e-6 for count in counts]


@pytest.mark.parametrize(
    ("channel", "before", "after"),
    [
        (COUNTER, 5000, 3),  # a GPU's, which never wraps around
        (PACKAGE, 200_000_000_000, 1000),  # 62 kJ up to the wrap-around, in 0.1 s
        (COUNTER, 5000, 5500),  # 500 J in 0.1 s
    ],
)
def test_a_reset_or_a_jump_is_an_error(channel, before, after):
    counter = Counter(channel)
    counter.joules(0.0, before)
    with pytest.raises(SensorError, match=f"{before * channel.unit:.6g} J"):
        counter.joules(0.1, after)


def test_a_counter_read_too_late_may_have_wrapped_more_than_once():
    counter = Counter(PACKAGE)
    counter.joules(0.0, MODULUS - 10)
    assert counter.joules(130.0, 5) == (MODULUS + 5) * 1e-6
    with pytest.raises(SensorError, match="--power_hz"):
        counter.joules(130.0 + 132.0, 20)
