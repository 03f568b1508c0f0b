"""What was planted is what a report finds: speed-ups, efficiencies, improvements, falls."""

from __future__ import annotations

import pytest

from candle_p1.reports.columns import TOTAL, TRAIN
from candle_p1.reports.speed import SIGNIFICANT, improvements, pairs, speedups
from candle_p1.reports.statistics import TOO_FEW
from tests.planted_records import experiment_of, planted_record

FIXED = {"load_s": 1.0, "startup_s": 1.0, "first_step_s": 0.0}


def ends(estimate):
    return estimate.value, estimate.low, estimate.high


def strong(total_s, num_ranks, **kwargs):
    """Returns a record of a strong-scaling study with this total, 8 epochs in all."""
    train_s = total_s - 2.0
    return planted_record(
        "nt3", num_ranks, epochs=8, epoch_s=train_s * num_ranks / 8, **FIXED | kwargs
    )


def test_planted_speedups_and_efficiencies_of_strong_scaling():
    experiment = experiment_of(
        *(strong(total_s, num) for total_s, num in ((40.0, 1), (25.0, 2)) for _ in range(4)),
        *(strong(16.0 * factor, 4) for factor in (0.5, 1, 1, 2)),
    )
    two, four = speedups(experiment, experiment.series[0], TOTAL)
    assert two.base_s == pytest.approx(40)
    assert (two.base.num_ranks, two.point.num_ranks) == (1, 2)
    assert ends(two.speedup) == pytest.approx((1.6, 1.6, 1.6))
    assert two.efficiency.value == pytest.approx(0.8)
    assert ends(four.speedup) == pytest.approx((2.5, 1.25, 5))
    assert ends(four.efficiency) == pytest.approx((0.625, 0.3125, 1.25))
    assert (four.speedup.is_confident, four.speedup.num) == (True, (4, 4))
    (alone, _) = speedups(experiment, experiment.series[0], TRAIN)
    assert ends(alone.speedup) == pytest.approx((38 / 23,) * 3)


def test_planted_improvements_are_found_exactly():
    records = [
        strong(total_s * (1 + 0.01 * repeat), num, loader=loader, rng_seed=repeat)
        for num in (1, 2, 4)
        for repeat in range(3)
        for loader, total_s in (("original", 40.0), ("parallel", 30.0))
    ]
    ((original, optimised),) = pairs(experiment_of(*records))
    assert (original.name, optimised.name) == ("loader original", "loader parallel")
    *counted, over_all = improvements(original, optimised, TOTAL)
    assert [each.num_ranks for each in counted] == [1, 2, 4]
    for each in counted:
        low, high = 100 * (1 - 0.75 * 1.02), 100 * (1 - 0.75 / 1.02)
        assert ends(each.percent) == pytest.approx((25, low, high))
        assert each.percent.confidence == pytest.approx(0.9)
        assert each.verdict == TOO_FEW
    assert (over_all.num_ranks, over_all.percent.num) == (None, (9,))
    assert ends(over_all.percent) == pytest.approx((25, 25, 25))
    assert over_all.verdict == SIGNIFICANT


def test_only_settings_of_the_paper_are_bases_of_improvements():
    records = [
        strong(30.0, 1, loader=loader, kernels=kernels, batch_size=size)
        for loader in ("original", "chunked", "cached", "parallel")
        for kernels in ("plain", "fast")
        for size in (20, 40)
    ]
    experiment = experiment_of(*records)
    found = pairs(experiment)
    for pair in found:
        before, after = pair.base.settings, pair.other.settings
        assert before["batch_size"] == after["batch_size"]
        assert before["loader"] in ("original", "chunked", after["loader"])
        assert after["loader"] != "original" or before["loader"] == "original"
        assert before["kernels"] in ("plain", after["kernels"])
    # 5 pairs of loaders for plain, fast, and plain against fast kernels, and 4 of kernels alone
    assert len(found) == len(set(found)) == 2 * (3 * 5 + 4)
    method = [pair for pair in found if pair.is_method]
    assert method == pairs(experiment, {True})
    loaders = {(pair.base.settings["loader"], pair.other.settings["loader"]) for pair in method}
    assert (loaders, len(method)) == ({("original", "chunked")}, 4)
    assert {*method, *pairs(experiment, {False})} == {*found}
