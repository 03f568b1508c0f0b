"""Mixed precision: the layers compute in the type that is asked for, and train as in float32."""

import csv
from importlib.util import find_spec

import pytest

from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.horovod, pytest.mark.jax_engine]
SHORT = "--epochs 4 --train_steps 4 --val_steps 2 --test_steps 2 --power none"
RUNS = {
    "nt3": f"nt3 {SHORT} --conv 4 20 1 --pool 10 --dense 8",
    "p1b2": f"p1b2 {SHORT} --dense 20 8 --feature_subsample 60",
    "p1b3": f"p1b3 {SHORT} --dense 20 8 --feature_subsample 60",
}
TYPES = ("f32", "bf16", "f16")
if not find_spec("horovod"):  # what the engine adds; tests/parallel trains with its f16
    RUNS, TYPES = {"p1b2": RUNS["p1b2"]}, TYPES[:2]
CLOSE = {"nt3": 0.05, "p1b2": 0.002, "p1b3": 0.03}
"""Relative to the last loss, which another seed changes by twice to ten times as much."""


@pytest.fixture(scope="module")
def place(train_all):
    runs = {(name, each): f"{RUNS[name]} --data_type {each}" for name in RUNS for each in TYPES}
    return train_all(1, {"-".join(names): line for names, line in runs.items()})


@pytest.mark.parametrize("data_type", TYPES[1:])
@pytest.mark.parametrize("name", RUNS)
def test_half_types_compute_and_learn(place, name, data_type):
    """On several ranks, tests/parallel/check_restart.py trains with both."""
    expected, found = (losses_of(place / f"{name}-{each}") for each in ("f32", data_type))
    assert found != expected
    assert found[-1] == pytest.approx(expected[-1], rel=CLOSE[name])
    model = read_record(place / f"{name}-{data_type}" / "run.json")["model"]
    assert model["data_type"] == data_type


def losses_of(directory):
    rows = csv.DictReader((directory / "history.csv").read_text().splitlines())
    return [float(row["loss"]) for row in rows]
