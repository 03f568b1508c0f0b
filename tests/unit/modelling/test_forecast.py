"""Forecasts: efficiencies, gains and the best scales, from sources whose answers are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from candle_p1.errors import ModelError, ParameterError
from candle_p1.modelling.forecast import forecast, parse_ranks
from candle_p1.modelling.phases import COMPUTE, LOAD
from candle_p1.modelling.samples import TimeSamples


@dataclass
class Planted:
    """Loads for some seconds, then shares 64 s of computing; 10 W for each rank."""

    load_s: float
    is_strong: bool = True
    watts: float | None = 10.0
    base_ranks: int = 1
    confidence: float | None = 0.9
    has_ideal: bool = True
    most: int = 64

    def can_run(self, num_ranks):
        return self.most % num_ranks == 0

    def samples(self, num_ranks):
        compute_s = 64 / num_ranks if self.is_strong else 64 * num_ranks**0.1
        scatter = np.linspace(0.9, 1.1, 101)
        times = {LOAD: self.load_s * np.ones(101), COMPUTE: compute_s * scatter}
        powers = None
        if self.watts:
            powers = {name: np.full(101, self.watts * num_ranks) for name in times}
        return TimeSamples(num_ranks, times, powers, max(1.0, num_ranks / 4))


def test_points_have_time_energy_efficiency_and_gain():
    found = forecast({"slow": Planted(8.0), "fast": Planted(2.0)}, [1, 16], "slow")
    slow, fast = (
        next(p for p in found.points if (p.series, p.num_ranks) == (name, 16))
        for name in ("slow", "fast")
    )
    assert slow.time_s.value == pytest.approx(8 + 4)
    assert (slow.time_s.low, slow.time_s.high) == pytest.approx((8 + 3.64, 8 + 4.36))
    assert slow.efficiency.value == pytest.approx(72 / 12 / 16)
    assert slow.energy_j.value == pytest.approx(160 * 12)
    assert slow.gain is None
    assert fast.gain.value == pytest.approx(50)
    assert fast.energy_gain.value == pytest.approx(50)
    assert fast.extrapolation == 4
    assert fast.shares == pytest.approx({LOAD: 1 / 3, COMPUTE: 2 / 3})
    assert fast.to_dict()["gain_percent"]["value"] == pytest.approx(50)


def test_the_best_scales_are_those_that_can_run():
    found = forecast({"slow": Planted(8.0)}, [64])
    (best,) = found.best
    assert best.searched == [1, 2, 4, 8, 16, 32, 64]  # 3, 6, 12, … cannot share the epochs
    # (8 + 64) / (8 + 64 / P) / P is 0.9 on 2 ranks, 0.75 on 4 and 0.56 on 8.
    assert best.efficient.value == 4
    assert best.least_energy.value == 1  # more ranks load at their power, too
    # P (8 + 64 / P)^2 is least on 8 ranks.
    assert best.least_energy_delay.value == 8
    assert best.to_dict()["efficient_ranks"]["value"] == 4


def test_weak_scaling_has_an_efficiency_of_its_own():
    found = forecast({"only": Planted(0.0, is_strong=False)}, [1024])
    (point,) = found.points
    assert point.efficiency.value == pytest.approx(0.5)
    assert not point.can_run
    assert found.best[0].efficient.value == 32


def test_without_power_there_is_no_energy():
    found = forecast({"only": Planted(1.0, watts=None)}, [4])
    assert found.points[0].energy_j is None
    assert found.best[0].least_energy is None


def test_readings_give_the_first_as_value_and_their_span():
    found = forecast({"only": Planted(0.0, confidence=None)}, [1])
    time_s = found.points[0].time_s
    assert (time_s.value, time_s.low, time_s.high) == pytest.approx((57.6, 57.6, 70.4))
    assert time_s.confidence is None


def test_without_an_ideal_there_is_no_efficiency():
    found = forecast({"only": Planted(1.0, has_ideal=False)}, [4])
    assert found.points[0].efficiency is None
    assert found.best[0].efficient is None
    assert found.best[0].least_energy is not None
    assert found.best[0].to_dict()["efficient_ranks"] is None


def test_nothing_to_predict_from_is_an_error():
    with pytest.raises(ModelError):
        forecast({}, [1])


@pytest.mark.parametrize("text", ["", "a", "0", "1,,2", "-4", "1.5", "10000000"])
def test_lists_of_ranks_are_checked(text):
    with pytest.raises(ParameterError, match="--ranks"):
        parse_ranks(text)


def test_lists_of_ranks_are_sorted():
    assert parse_ranks("48,1,6,6") == [1, 6, 48]
