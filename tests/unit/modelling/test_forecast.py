"""Forecasts: efficiencies, gains, the best scales, and what if, from sources with known answers."""

import numpy as np
import pytest

from candle_p1.modelling.forecast import Changes, ForecastSource, best_scale, forecast
from candle_p1.modelling.laws import COMPUTE, EXPOSED, LOAD, TRANSFER, WAIT
from candle_p1.modelling.observations import ShapeRule
from candle_p1.modelling.samples import TimeSamples
from tests.planted_records import planted_record

RULE = ShapeRule.of([planted_record("nt3", 2, epochs=48, epochs_scaling="strong")])


def planted(load_s, is_strong=True, watts=10.0, **kwargs):
    """Returns what loads for some seconds, then shares 64 s of computing; 10 W for each rank."""

    def samples(num_ranks):
        compute_s = 64 / num_ranks if is_strong else 64 * num_ranks**0.1
        times = {LOAD: load_s * np.ones(101), COMPUTE: compute_s * np.linspace(0.9, 1.1, 101)}
        powers = {name: np.full(101, watts * num_ranks) for name in times} if watts else None
        return TimeSamples(num_ranks, times, powers, max(1.0, num_ranks / 4))

    return ForecastSource(samples, lambda num_ranks: 64 % num_ranks == 0, is_strong, **kwargs)


def test_points_have_time_energy_efficiency_and_gain():
    found = forecast({"slow": planted(8.0), "fast": planted(2.0)}, [1, 16], "slow")
    points = {(each["series"], each["ranks"]): each for each in found}
    slow, fast = points["slow", 16], points["fast", 16]
    assert slow["time_s"] == pytest.approx({"value": 8 + 4, "low": 8 + 3.64, "high": 8 + 4.36})
    assert slow["efficiency"]["value"] == pytest.approx(72 / 12 / 16)
    assert slow["energy_j"]["value"] == pytest.approx(160 * 12)
    assert slow["gain_percent"] is slow["energy_gain_percent"] is None
    assert fast["gain_percent"]["value"] == pytest.approx(50)
    assert fast["energy_gain_percent"]["value"] == pytest.approx(50)
    assert (fast["extrapolation"], fast["can_run"]) == (4, True)
    assert fast["shares"] == pytest.approx({LOAD: 1 / 3, COMPUTE: 2 / 3})


def test_the_best_scales_are_those_that_can_run():
    best = best_scale("slow", planted(8.0), [64])
    assert best["searched"] == [1, 2, 4, 8, 16, 32, 64]  # 3, 6, 12, … cannot share the epochs
    # (8 + 64 / P) / P is 0.9 on 2 ranks, 0.75 on 4 and 0.56 on 8.
    assert best["efficient_ranks"]["value"] == 4
    assert best["least_energy_ranks"]["value"] == 1  # more ranks load at their power, too
    # P (8 + 64 / P)^2 is least on 8 ranks.
    assert best["least_energy_delay_ranks"]["value"] == 8


def test_weak_scaling_has_an_efficiency_of_its_own_and_what_is_unknown_is_none():
    source = planted(0.0, is_strong=False, watts=None)
    (point,), best = forecast({"only": source}, [1024]), best_scale("only", source, [1024])
    assert point["efficiency"]["value"] == pytest.approx(0.5)
    assert point["energy_j"] is best["least_energy_ranks"] is None
    assert not point["can_run"]
    assert best["efficient_ranks"]["value"] == 32
    source = planted(1.0, has_ideal=False)
    assert forecast({"only": source}, [4])[0]["efficiency"] is None
    assert best_scale("only", source, [4])["efficient_ranks"] is None


def test_readings_give_the_first_as_value_and_their_span():
    (point,) = forecast({"only": planted(0.0, confidence=None)}, [1])
    assert point["time_s"] == pytest.approx({"value": 57.6, "low": 57.6, "high": 70.4})


def test_epochs_and_batches_change_the_shape():
    def rule_with(word):
        return Changes.parse([word]).apply_to(RULE)

    rule = rule_with("epochs_per_rank=8")
    assert (rule.at(16).epochs, rule.is_strong, rule.can_run(5)) == (8, False, True)
    assert rule_with("epochs=96").at(4).epochs == 24
    halved = rule_with("batch_size=10").at(4)
    assert (halved.batch_size, halved.steps_per_epoch) == (10, 20)


def test_a_faster_network_or_file_system_shortens_what_waits_for_it():
    times = {LOAD: 8.0, WAIT: 4.0, EXPOSED: 4.0, TRANSFER: 2.0, COMPUTE: 10.0}
    watts = {name: np.full(200, 5.0 if name == LOAD else 10.0) for name in times}
    known = TimeSamples(4, {n: np.full(200, each) for n, each in times.items()}, watts, 1.0)
    found = Changes.parse(["network=2"]).apply_to_times(known, None)
    assert found.total_s[0] == pytest.approx(28 - 3)
    # Energy is that of the phases that got shorter.
    assert found.energy_j[0] == pytest.approx(known.energy_j[0] - 30)
    faster = Changes(file_system=4)
    phases_s = faster.apply_to_times(known, 0.5).phases_s  # half of loading is reading
    assert (phases_s[LOAD][0], phases_s[WAIT][0]) == pytest.approx((4 + 1, 2 + 0.5))
    unknown = faster.apply_to_times(known, None).phases_s[LOAD]
    assert unknown.min() == pytest.approx(2, abs=0.3)  # all of it is reading
    assert unknown.max() == pytest.approx(8, abs=0.3)  # nothing is
