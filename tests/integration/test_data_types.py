"""Mixed precision: the layers compute in the type that is asked for, and train as in float32."""

from __future__ import annotations

import csv

import pytest

from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.horovod, pytest.mark.jax_engine]
SHORT = "--epochs 4 --epochs_scaling none --train_steps 4 --power none --check_replicas True"
RUNS = {
    "nt3": f"{SHORT} --conv 4 20 1 --pool 10 --dense 8",
    "p1b1": f"{SHORT} --dense 20 8 --feature_subsample 60",
    "p1b2": f"{SHORT} --dense 20 8 --feature_subsample 60",
    "p1b3": f"{SHORT} --dense 20 8 --feature_subsample 60 --val_steps 2 --test_steps 2",
}
TYPES = ("bf16", "f16")
SEEDS = range(1, 6)


@pytest.fixture(scope="module")
def place(train_all):
    runs = {
        f"{name}-{seed}": f"{name} {flags} --rng_seed {seed}"
        for name, flags in RUNS.items()
        for seed in SEEDS
    }
    runs |= {
        f"{name}-{each}": f"{name} {flags} --rng_seed 1 --data_type {each}"
        for name, flags in RUNS.items()
        for each in TYPES
    }
    return train_all(2, runs, limit_s=1200)


@pytest.mark.parametrize("data_type", TYPES)
@pytest.mark.parametrize("name", RUNS)
def test_half_types_compute_and_learn(place, name, data_type):
    losses = {run: losses_of(place / f"{name}-{run}") for run in (*map(str, SEEDS), data_type)}
    assert losses[data_type] != losses["1"]
    at_the_end = [losses[str(seed)][-1] for seed in SEEDS]
    spread = max(at_the_end) - min(at_the_end)
    assert losses[data_type][-1] == pytest.approx(losses["1"][-1], abs=spread)
    model = read_record(place / f"{name}-{data_type}" / "run.json")["model"]
    assert model["data_type"] == data_type
    assert read_record(place / f"{name}-1" / "run.json")["model"]["data_type"] == "f32"


def losses_of(directory):
    rows = csv.DictReader((directory / "history.csv").read_text().splitlines())
    return [float(row["loss"]) for row in rows]
