from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from candle_p1.benchmark import find_benchmark

pytestmark = pytest.mark.extended

P1B2 = find_benchmark("p1b2").recipe
synthetic = sys.modules[type(P1B2).__module__]


@pytest.fixture(scope="module")
def tables(small_data):
    """The small data, by role."""
    return {role: pd.read_csv(small_data("p1b2") / name) for role, name in P1B2.roles.items()}


@pytest.fixture(scope="module")
def full_tumors():
    """Tumors of the full data: (types, impacts), some of each type."""
    genome = synthetic.Genome.draw(synthetic.SIZES["full"], seed=2019)
    types = np.arange(200) % len(synthetic.CANCER_TYPES)
    return types, np.stack([genome.tumor(patient, types[patient], 2019) for patient in range(200)])


def test_ten_types_are_balanced_and_in_random_order(tables):
    for role, table in tables.items():
        frequency = Counter(table["cancer_type"])
        assert set(frequency) == set(synthetic.CANCER_TYPES)
        assert set(frequency.values()) == {{"train": 32, "test": 16}[role]}
        assert len(set(table["cancer_type"][:20])) > 5


def test_impacts_are_small_integers_and_mostly_0(tables, full_tumors):
    for table in tables.values():
        impacts = table.iloc[:, 2:].to_numpy()
        assert impacts.dtype == np.int64
        assert impacts.min() == 0
        assert (impacts == 0).mean() > 0.85
        assert (impacts > 9).mean() < 0.01
    _, impacts = full_tumors
    assert 0.95 < (impacts == 0).mean() < 0.995
    assert (impacts > 9).mean() < 0.001


def test_burdens_differ_more_than_tenfold_between_tumors(full_tumors):
    num_mutated = (full_tumors[1] > 0).sum(axis=1)
    assert np.quantile(num_mutated, 0.95) > 10 * np.quantile(num_mutated, 0.05)
    assert num_mutated.min() > 0


def test_drivers_are_mutated_more_often_in_their_type():
    genome = synthetic.Genome.draw(synthetic.SIZES["small"], seed=4)
    tumors = [
        np.mean([genome.tumor(patient, kind, 4) > 0 for patient in range(kind, 600, 10)], axis=0)
        for kind in range(10)
    ]
    own = genome.drivers[:, :3]  # the most frequent
    in_own = np.mean([tumors[kind][own[kind]].mean() for kind in range(10)])
    in_others = np.mean([tumors[kind - 1][own[kind]].mean() for kind in range(10)])
    assert in_own > in_others + 0.15
    assert len(np.unique(genome.drivers)) == 11 * 8


def test_types_can_be_predicted_by_their_mean_rates(tables):
    train, test = (tables[role].iloc[:, 2:].to_numpy() > 0 for role in ("train", "test"))
    train_types, test_types = (tables[role]["cancer_type"].to_numpy() for role in tables)
    names = np.array(synthetic.CANCER_TYPES)
    rates = np.stack([(train[train_types == name].sum(axis=0) + 0.5) / 33 for name in names])
    likelihood = test @ np.log(rates).T + ~test @ np.log(1 - rates).T
    predicted = names[likelihood.argmax(axis=1)]
    assert 0.4 < (predicted == test_types).mean() < 0.95
