from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from candle_p1.instrument.power.sampler import joules
from candle_p1.records.power_trace import Channel, Trace, add

COUNTER = Channel("package-0", "package 0", "cpu", "rapl", "energy", 1.0, None, 1000.0, 0.001)
GAUGE = Channel("gpu:GPU-1", "H100", "gpu", "nvml", "power")
SLOW = Channel("node", "node", "node", "cray", "energy", resolution_s=0.1)
POWERS_W = st.lists(st.floats(1, 1000), min_size=1, max_size=8)


def sampled(channel, function, duration_s, hz=10.0, start_s=0.0):
    """Returns what a sensor reads of a power or of an energy that is a function of time."""
    times_s = start_s + np.arange(int(duration_s * hz) + 1) / hz
    return Trace(channel, times_s, np.array([function(t) for t in times_s], float), 1 / hz)


def without(trace, begin_s, end_s):
    """Returns a trace without the samples in a time."""
    kept = (trace.times_s < begin_s) | (trace.times_s > end_s)
    return replace(trace, times_s=trace.times_s[kept], values=trace.values[kept])


STEPS_W = [60.0, 120.0, 600.0, 300.0]
"""The powers of idling, loading, training and evaluating."""
BOUNDS_S = 15.03 * np.arange(5)


def steps_w(time_s):
    return STEPS_W[min(int(time_s // 15.03), 3)]


def steps_j(time_s):
    return np.interp(time_s, BOUNDS_S, np.cumsum([0.0, *STEPS_W]) * 15.03)


@pytest.mark.parametrize(("channel", "function"), [(GAUGE, steps_w), (COUNTER, steps_j)])
def test_a_piecewise_power_is_integrated_within_a_tenth_of_a_percent(channel, function):
    trace = sampled(channel, function, 60.1)
    found = trace.energy(0, 60.1)
    assert found.energy_j == pytest.approx(steps_j(60.1), rel=1e-3)
    assert (found.kind, found.num_samples, found.few_samples) == ("measured", 602, False)
    assert found.mean_w == pytest.approx(steps_j(60.1) / 60.1, rel=1e-3)
    # Within a step nothing is lost, whatever the place of the samples.
    assert trace.energy(31.234, 44.567).energy_j == pytest.approx(600 * 13.333)


def test_lines_between_samples_are_integrated_exactly():
    found = sampled(GAUGE, lambda t: 10 * t, 10).energy(2.03, 7.38)
    assert found.energy_j == pytest.approx(5 * (7.38**2 - 2.03**2))


@given(
    POWERS_W,
    st.lists(st.floats(0, 1), max_size=5),
    st.sampled_from([GAUGE, COUNTER]),
    st.floats(-1e6, 1e6),
)
def test_energies_of_phases_add_up_to_that_of_the_run(powers_w, shares, channel, start_s):
    def power_w(time_s):
        return powers_w[min(int(time_s - start_s), len(powers_w) - 1)]

    trace = sampled(channel, power_w, len(powers_w), start_s=start_s)
    if channel is COUNTER:
        trace = replace(trace, values=np.cumsum(trace.values))
    begin_s, end_s = trace.times_s[0] - 0.05, trace.times_s[-1] + 0.05
    bounds_s = [begin_s, *sorted(begin_s + share * (end_s - begin_s) for share in shares), end_s]
    parts = list(pairwise(bounds_s))
    assume(all(end - begin > 1e-3 for begin, end in parts))
    energies = [trace.energy(begin, end) for begin, end in parts]
    total = trace.energy(begin_s, end_s)
    assert add(energies).energy_j == pytest.approx(total.energy_j, rel=1e-6)
    assert all(energy.energy_j > 0 for energy in energies)


GONE = "from 10.1 s on: gone"
EVEN = COUNTED, GAUGED = sampled(COUNTER, lambda t: 50 * t, 10), sampled(GAUGE, lambda t: 50, 10)
FINE = sampled(SLOW, lambda t: 100 * t, 10, hz=100)
SELDOM = sampled(SLOW, lambda t: 200 * np.floor(t * 10) / 10, 20, hz=50)
STUCK = sampled(COUNTER, lambda t: 50 * min(t, 4), 20)
GAP_COUNTED, GAP_GAUGED = (without(trace, 4.01, 5.99) for trace in EVEN)
ENDED = replace(GAUGED, ended=GONE)


@pytest.mark.parametrize(
    ("trace", "begin_s", "end_s", "kind", "expected"),
    [
        # Shorter than three samples, or than three updates of the sensor
        (COUNTED, 1.05, 1.22, "few", 8.5),
        (COUNTED, 1.05, 1.35, "measured", 15),
        (FINE, 1, 1.2, "few", 20),
        (FINE, 1, 1.4, "measured", 40),
        # Beyond the samples
        *((trace, -0.09, 10.09, "estimated", 509) for trace in EVEN),
        *((trace, -0.11, 5, "absent", "0.11 s") for trace in EVEN),
        *((trace, 5, 10.11, "absent", "0.11 s") for trace in EVEN),
        # In a short gap, mostly in a long one, and around one, in which a counter goes on
        *((without(trace, 4.01, 4.79), 4.1, 4.6, "few", 25) for trace in EVEN),
        *((without(trace, 4.01, 7.99), 3.5, 6, "absent", "not read for 4") for trace in EVEN),
        (GAP_GAUGED, 0, 10, "estimated", 500),
        (GAP_GAUGED, 0, 3.9, "measured", 195),
        (GAP_GAUGED, 6.1, 9, "measured", 145),
        (GAP_COUNTED, 0, 10, "measured", 500),
        (GAP_COUNTED, 0, 5, "estimated", 250),
        # Of a counter that does not change any more, or is read more often than updated
        (STUCK, 0, 3.9, "measured", 195),
        *((STUCK, *bounds, "absent", "16 s") for bounds in ((0, 10), (10, 12), (10, 20), (0, 20))),
        (SELDOM, 2, 18, "measured", 3200),
        (SELDOM, 3.02, 3.08, "absent", "no energy"),
        # Without power, time, samples, and after the end
        (sampled(GAUGE, lambda t: 0, 10), 1, 9, "absent", "no energy"),
        (GAUGED, 3, 3, "absent", "duration is 0"),
        (Trace(GAUGE, np.ones(1), np.ones(1), 0.1, GONE), 1, 1.05, "absent", GONE),
        (ENDED, 0, 10, "measured", 500),
        (ENDED, 5, 11, "absent", GONE),
    ],
)
def test_an_energy_is_measured_estimated_or_absent_and_never_0(
    trace, begin_s, end_s, kind, expected
):
    found = trace.energy(begin_s, end_s)
    assert (found.kind, found.few_samples) == (
        "estimated" if kind == "few" else kind,
        kind == "few",
    )
    if kind == "absent":
        assert (found.energy_j, found.mean_w) == (None, None)
        assert expected in found.reason
        assert add([GAUGED.energy(0, 5), found]).energy_j is None
    else:
        assert found.energy_j == pytest.approx(expected, rel=1e-2 if trace is SELDOM else 1e-6)


# --- Counters -------------------------------------------------------------------------------------

MODULUS = 262_143_328_911
PACKAGE = Channel("package-0", "package 0", "cpu", "rapl", "energy", 1e-6, MODULUS, 2000.0, 0.001)


@given(
    st.lists(st.integers(1, 150_000_000), min_size=1, max_size=50),
    st.sampled_from([400_000_000, MODULUS]),
    st.floats(0, 1, exclude_max=True),
)
def test_wrap_around_is_exact(steps_uj, modulus, first):
    counts = np.cumsum([int(first * modulus), *steps_uj])
    shown, times_s = (counts % modulus).astype(float), 0.1 * np.arange(len(counts))
    found, error = joules(replace(PACKAGE, modulus=modulus), times_s, shown)
    assert (found.tolist(), error) == ([int(count) * 1e-6 for count in counts], None)


@pytest.mark.parametrize(
    ("channel", "before", "after", "after_s", "named"),
    [
        (COUNTER, 5000, 3, 0.1, "5000 J"),  # a GPU's, which never wraps around
        (PACKAGE, 200_000_000_000, 1000, 0.1, "200000 J"),  # 62 kJ up to the wrap-around
        (COUNTER, 5000, 5500, 0.1, "5000 J"),
        (PACKAGE, MODULUS - 10, 5, 132.0, "--power_hz"),  # it may have wrapped more than once
    ],
)
def test_a_reset_a_jump_or_a_late_reading_ends_a_trace(channel, before, after, after_s, named):
    times_s, counts = np.array([0, after_s, after_s + 0.1]), np.array([before, after, after + 1.0])
    found, error = joules(channel, times_s, counts)
    assert found.tolist() == [before * channel.unit]
    assert named in error
