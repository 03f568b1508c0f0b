"""How long a study takes, from runs outside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from candle_p1.records.environment import cpu_model
from candle_p1.studies.cost import LAUNCH_S, SIMILAR, estimate, explain
from candle_p1.studies.planned_run import PlannedRun
from candle_p1.studies.similar import SimilarRuns
from tests.planted_records import PARAMETERS, plant, planted_record

OF_RECORD = {
    "epochs": 8, "startup_s": 3.0, "load_s": 2.0, "first_step_s": 0.5, "epoch_s": 1.0, "threads": 2,
    "learning_rate": 0.01, "environment": {"cpu": cpu_model()}, "train_steps": 10,
}  # fmt: skip
"""8 s of training, and 5.5 s of everything else, on one rank with two cores."""


@pytest.fixture
def run(tmp_path):
    settings = PARAMETERS | {"epochs": 8, "train_steps": 10}
    return PlannedRun(
        series="", repeat=0, benchmark="nt3", num_ranks=1, threads=2, environment={}, flags={},
        settings=settings, epochs_per_rank=8, minutes=5, study_directory=tmp_path / "mine",
    )  # fmt: skip


def similar(*records):
    return SimilarRuns(records, num_cores=2)


@pytest.mark.parametrize(
    ("changes", "settings", "seconds"),
    [
        ({}, {}, 5.5 + 8),
        ({}, {"learning_rate": 0.5, "rng_seed": 7, "power": "none", "val_steps": 1}, 5.5 + 8),
        ({}, {"epochs": 32}, 5.5 + 32),
        ({}, {"train_steps": 5}, 5.5 + 4),
        ({}, {"batch_size": 5}, 5.5 + 4),
        ({"threads": 1}, {}, 5.5 + 16),
        ({"threads": None}, {}, 5.5 + 8),
        ({"num_ranks": 2, "threads": 1}, {}, 5.5 + 8),  # half the epochs, half the cores
        ({"num_ranks": 4, "threads": None}, {}, 2 * 5.5 + 8),
    ],
)
def test_the_time_is_scaled_by_work_and_cores(run, changes, settings, seconds):
    planned = replace(run, settings=run.settings | settings, **changes)
    found = similar(planted_record(**OF_RECORD)).estimate_s(planned)
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    "different",
    [
        {"benchmark": "p1b1"},
        {"size": "full"},
        {"dense": [200, 20]},
        {"train_data": "/data/nt3.csv"},
        {"training": {"profiled": True}},
        {"status": "failed"},
    ],
)
def test_other_runs_are_not_similar(run, different):
    planned = replace(run, settings=run.settings | {"dense": [100], "train_data": None})
    assert similar(planted_record(**OF_RECORD | different)).estimate_s(planned) is None


def test_few_steps_tell_nothing(run, monkeypatch):
    monkeypatch.setattr("candle_p1.studies.similar.MIN_STEPS", 81)
    assert similar(planted_record(**OF_RECORD)).estimate_s(run) is None


def test_the_nearest_run_counts(run):
    records = [
        planted_record(**OF_RECORD | {"startup_s": 30.0, "loader": "original"}),
        planted_record(num_ranks=2, **OF_RECORD | {"startup_s": 20.0}),
        planted_record(**OF_RECORD),
    ]
    assert similar(*records).estimate_s(run) == pytest.approx(5.5 + 8)
    assert similar(*records[:2]).estimate_s(run) > 20


def test_runs_are_looked_for_beside_the_study(run, tmp_path):
    for place in ("nt3/EXP000", "other-small", "mine", "away/too/far/down"):
        (tmp_path / place).mkdir(parents=True)
        plant(tmp_path / place, **OF_RECORD)
    plant(tmp_path / "other-small", **OF_RECORD | {"environment": {"cpu": "another one"}})
    plant(tmp_path / "other-small", status="running")
    (tmp_path / "other-small/run002/run.json").write_text("{")
    found = SimilarRuns.beside(tmp_path / "mine")
    assert len(found.records) == 2
    cost = estimate(run, [], found)
    assert cost.basis == SIMILAR
    assert cost.seconds > LAUNCH_S + 5
    assert explain([cost]).startswith("1 run, about ")
    assert estimate(run, [], SimilarRuns([], 2)).basis == "limit"
