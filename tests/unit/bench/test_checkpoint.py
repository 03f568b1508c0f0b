from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from candle_p1 import cli
from candle_p1.bench.checkpoint import (
    Checkpoint,
    daly_interval_s,
    expected_ratio,
    young_interval_s,
)
from candle_p1.bench.checkpoint_task import BACKUP, OURS, VARIANTS
from candle_p1.records.tables import as_cells

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
def saved(compare, tmp_path):
    """Compares with jobs whose outcomes a function (task, num_ranks) returns."""

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
        shown = [
            part if isinstance(part, str) else as_cells(part) for part in comparison.render(report)
        ]
        return report, tasks, str(shown)

    return saved


def test_variants_are_measured_in_turn_after_their_memory(saved):
    _, tasks, _ = saved(num_rounds=2)
    assert [task.variant for task in tasks] == [*VARIANTS, *VARIANTS, *VARIANTS[::-1]]
    assert [task.samples_memory for task in tasks] == [True] * 4 + [False] * 8
    assert len({task.directory for task in tasks}) == len(tasks)


def test_saves_are_compared_with_the_plain_write_before_each_of_them(saved):
    report, _, shown = saved(num_rounds=3)
    ours = report["results"][0]
    assert (ours["repeats_s"], ours["first_s"]) == ([0.5] * 6, [9.0] * 3)
    assert report["plain_write"]["repeats_s"] == [1.6] * 24
    assert ours["safe"]["median_s"] == 3.0
    assert ours["bytes_per_s"] == pytest.approx(1e9 / 3)
    assert sorted(ours["range_relative_rate"]) == pytest.approx([0.4, 0.8])
    assert ours["relative_rate"] == pytest.approx(0.6)
    assert ours["ci95_relative_rate"] is not None
    assert report["wait_ratio"]["value"] == pytest.approx(0.5 / 3, rel=0.5)
    assert all(text in shown for text in ("--ckpt_every_s 415", *VARIANTS))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_is_what_saving_adds_to_the_peak_of_training(saved, num_ranks):
    report, *_ = saved(num_rounds=1, num_ranks=num_ranks)
    copies = {result["variant"]: result["peak_copies"] for result in report["results"]}
    assert (copies[OURS], copies[BACKUP]) == pytest.approx((1, 2))
    prepare_s = 19.0 + num_ranks
    expected = {"prepare_s": prepare_s, "restore_s": 1.5, "total_s": prepare_s + 1.5}
    assert report["restart"] == expected


def test_the_cost_of_a_checkpoint_includes_what_the_steps_beside_it_lose(saved):
    report, *_ = saved(num_rounds=3, mtbf_hours=24.0)
    ours, waiting = report["results"][:2]
    assert ours["delay"]["median_s"] == pytest.approx(0.5 + 0.2 + 0.3)
    assert ours["step_slowdown"] == pytest.approx(0.85 / 0.6)
    assert ours["num_steps_beside"] == 12
    assert waiting["variant"] == "candle_p1, waiting"
    assert waiting["step_slowdown"] is None
    advice = report["advice"]
    assert advice["cost_s"] == pytest.approx(1.0)
    young, daly = advice["intervals"]
    assert young["interval_s"] == pytest.approx(young_interval_s(1.0, 86_400))
    assert daly["interval_s"] == pytest.approx(daly_interval_s(1.0, 86_400))
    assert daly["steps"] == pytest.approx(daly["interval_s"] / 0.6)
    assert daly["epochs"] == pytest.approx(daly["steps"] / 10)


def test_noise_makes_no_checkpoint_free_and_no_time_infinite(saved):
    fast = [FIRST, *[SAVE | {"beside_s": [0.1, 0.1]}] * 2]
    hopeless = {"num_rounds": 1, "mtbf_hours": 0.01 / 3600}
    report, _, shown = saved(lambda task, num: outcome_of(task, num, fast), **hopeless)
    assert report["advice"]["cost_s"] == 0.5
    assert report["advice"]["intervals"][1]["expected_extra"] is None
    assert "unlimited" in shown


@pytest.mark.parametrize("hours", ["0", "nan"])
def test_a_mean_time_that_is_no_time_is_refused(hours):
    result = CliRunner().invoke(cli.cli, ["bench", "checkpoint", "nt3", "--mtbf", hours])
    assert result.exit_code
    assert "--mtbf" in (result.output + str(result.exception))


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
    assert daly_interval_s(2.0, 1.0) == 1.0


@given(costs_s, means_s, restarts_s)
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


def test_a_restart_is_a_cost_of_every_failure_and_no_ratio_overflows():
    ratios = [expected_ratio(600, 2, 86_400, restart_s) for restart_s in (0, 60)]
    assert ratios[0] == pytest.approx(1 + 2 / 600 + 300 / 86_400, rel=1e-3)  # to first order
    assert ratios[1] / ratios[0] == pytest.approx(math.exp(60 / 86_400))
    assert expected_ratio(1e6, 1, 1, 0) == expected_ratio(1, 1, 1, 1e6) == math.inf
