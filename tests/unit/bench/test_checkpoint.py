from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from candle_p1.bench.checkpoint import Checkpoint, daly_interval_s, expected_ratio, young_interval_s
from candle_p1.bench.checkpoint_task import BACKUP, OURS, VARIANTS

ALONE_S = [0.5, 0.7]
FIRST = {"wait_s": 9.0, "safe_s": 9.0, "plain_s": 1.0, "alone_s": ALONE_S, "beside_s": []}
SAVE = {"wait_s": 0.5, "safe_s": 2.0, "plain_s": 1.6, "alone_s": ALONE_S, "beside_s": [0.8, 0.9]}
SAVES = [FIRST, SAVE, SAVE | {"safe_s": 4.0}]
WAITING = [FIRST, *(SAVE | {"wait_s": wait_s, "beside_s": []} for wait_s in (2.0, 4.0))]
STATE_BYTES = 1_000_000_000
OUTCOME = {
    **{"state_bytes": STATE_BYTES, "num_arrays": 12, "file_bytes": 1_000_100_000},
    **{"prepare_s": 20.0, "restore_s": 1.5, "steps_per_epoch": 10, "batch_size": 100},
    **{"threads": 2, "device": "cpu", "training_memory": [], "memory": []},
}


def outcome_of(task, num_ranks, ours=SAVES):
    saves, copies = (ours, 1) if task.variant == OURS else (WAITING, 2)
    outcome = OUTCOME | {"saves": saves}
    if task.samples_memory:
        outcome["training_memory"] = [(0.0, 500), (1.0, 700)]
        outcome["memory"] = [(2.0, 600), (3.0, 700 + copies * STATE_BYTES // num_ranks)]
    return [outcome | {"prepare_s": 20.0 + rank} for rank in range(num_ranks)]


@pytest.fixture
def saved(compare, printed, tmp_path):
    def saved(measure=outcome_of, **conditions):
        tasks, directory = [], tmp_path / "disk"
        directory.mkdir()

        def run(task, num_ranks):
            assert list(Path(task.directory).iterdir()) == []
            tasks.append(task)
            return measure(task, num_ranks)

        comparison = Checkpoint(benchmark="nt3", directory=str(directory), **conditions)
        report = compare(comparison, run)
        assert list(directory.iterdir()) == []
        return report, tasks, printed(comparison.render(report))

    return saved


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_variants_are_compared_in_turn_after_their_memory(saved, num_ranks):
    report, tasks, _ = saved(num_rounds=2, num_ranks=num_ranks)
    assert [task.variant for task in tasks] == [*VARIANTS, *VARIANTS, *VARIANTS[::-1]]
    assert [task.samples_memory for task in tasks] == [True] * 4 + [False] * 8
    # Saves, with the plain write before each of them.
    ours = report["results"][0]
    assert (ours["repeats_s"], ours["first_s"]) == ([0.5] * 4, [9.0] * 2)
    assert report["plain_write"]["repeats_s"] == [1.6] * 16
    assert (ours["safe"]["median_s"], ours["bytes_per_s"]) == pytest.approx((3.0, 1e9 / 3))
    assert sorted(ours["range_relative_rate"]) == pytest.approx([0.4, 0.8])
    assert ours["relative_rate"] == pytest.approx(0.6)
    assert report["wait_ratio"]["value"] == pytest.approx(0.5 / 3, rel=0.5)
    # Memory is what saving adds to the peak of training.
    copies = {result["variant"]: result["peak_copies"] for result in report["results"]}
    assert (copies[OURS], copies[BACKUP]) == pytest.approx((1, 2))
    prepare_s = 19.0 + num_ranks  # of the slowest rank
    assert report["restart"]["total_s"] == prepare_s + report["restart"]["restore_s"]


def test_the_cost_of_a_checkpoint_includes_what_the_steps_beside_it_lose(saved):
    report, _, shown = saved(num_rounds=3, mtbf_hours=24.0)
    ours, waiting = report["results"][:2]
    assert ours["delay"]["median_s"] == pytest.approx(0.5 + 0.2 + 0.3)
    assert (ours["step_slowdown"], ours["num_steps_beside"]) == (pytest.approx(0.85 / 0.6), 12)
    assert waiting["step_slowdown"] is None
    assert report["advice"]["cost_s"] == pytest.approx(1.0)
    young, daly = report["advice"]["intervals"]
    assert young["interval_s"] == pytest.approx(young_interval_s(1.0, 86_400))
    interval_s = daly_interval_s(1.0, 86_400)
    found = [daly[name] for name in ("interval_s", "steps", "epochs")]
    assert found == pytest.approx([interval_s, interval_s / 0.6, interval_s / 0.6 / 10])
    assert f"--ckpt_every_s {round(interval_s)}" in shown


def test_noise_makes_no_checkpoint_free_and_no_time_infinite(saved):
    fast = [FIRST, *[SAVE | {"beside_s": [0.1, 0.1]}] * 2]
    hopeless = {"num_rounds": 1, "mtbf_hours": 0.01 / 3600}
    report, _, shown = saved(lambda task, num: outcome_of(task, num, fast), **hopeless)
    assert (report["advice"]["cost_s"], "unlimited" in shown) == (0.5, True)
    assert report["advice"]["intervals"][1]["expected_extra"] is None


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
