from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from candle_p1.benchmark import find_benchmark

pytestmark = pytest.mark.extended

P1B1 = find_benchmark("p1b1").recipe
synthetic = sys.modules[type(P1B1).__module__]


@pytest.fixture(scope="module")
def tables(small_data):
    """The small data, by role."""
    return {role: pd.read_csv(small_data("p1b1") / P1B1.roles[role]) for role in ("train", "test")}


@pytest.fixture(scope="module")
def scaled(tables):
    """(train, test): the levels, scaled to [0, 1] by both."""
    train, test = (tables[role].iloc[:, 2:].to_numpy() for role in ("train", "test"))
    both = np.concatenate([train, test])
    low, high = both.min(axis=0), both.max(axis=0)
    return [(part - low) / np.where(high > low, high - low, 1) for part in (train, test)]


def test_values_are_logarithms_of_levels_with_many_zeros(tables):
    for table in tables.values():
        assert all(name.startswith("ENSG") for name in table.columns[2:])
        levels = table.iloc[:, 2:].to_numpy()
        assert levels.min() == 0
        assert 12 < levels.max() < 40
        assert 0.3 < (levels == 0).mean() < 0.6
        assert levels[levels > 0].min() >= 1


def test_types_are_as_frequent_as_in_tcga_and_in_random_order(tables):
    frequency = Counter(tables["train"]["cancer_type"])
    assert set(frequency) <= set(synthetic.CANCER_TYPES)
    assert len(frequency) > 20
    assert frequency.most_common(1)[0][0] == "BRCA"
    assert len(set(tables["train"]["cancer_type"][:20])) > 5


def test_landmarks_name_columns_of_the_table(small_data, tables):
    landmarks = pd.read_csv(small_data("p1b1") / P1B1.roles["landmarks"], sep="\t")
    assert len(landmarks) == landmarks["gdc"].nunique() == 20
    assert set(landmarks["gdc"]) <= set(tables["train"].columns[2:])
    levels = tables["train"][landmarks["gdc"]]
    assert (levels.std() > tables["train"].iloc[:, 2:].std().median()).mean() > 0.9


def test_full_data_have_978_landmarks():
    genes = synthetic.Genes.draw(synthetic.SIZES["full"], seed=2019)
    landmarks = genes.landmarks(978)
    assert len(set(landmarks)) == len(set(genes.pathway[landmarks])) == 978
    assert genes.baseline[landmarks].min() > synthetic.DETECTION_LIMIT


def test_two_dimensions_describe_most_of_a_profile(scaled):
    train, test = scaled
    mean = train.mean(axis=0)
    _, _, components = np.linalg.svd(train - mean, full_matrices=False)
    compressed = (test - mean) @ components[:2].T
    naive = ((test - mean) ** 2).mean()
    left = ((test - mean - compressed @ components[:2]) ** 2).mean()
    assert 0.04 < naive < 0.06
    assert 0.05 * naive < left < 0.35 * naive


def test_types_can_be_predicted_by_the_nearest_mean_profile(scaled, tables):
    train_types, test_types = (tables[role]["cancer_type"].to_numpy() for role in tables)
    names = sorted(set(train_types))
    means = np.stack([scaled[0][train_types == name].mean(axis=0) for name in names])
    distances = ((scaled[1][:, np.newaxis] - means) ** 2).sum(axis=2)
    predicted = np.array(names)[distances.argmin(axis=1)]
    chance = Counter(test_types).most_common(1)[0][1] / len(test_types)
    assert (predicted == test_types).mean() > 4 * chance


def test_types_of_an_organ_system_are_close_to_each_other():
    place = synthetic.Genes.draw(synthetic.SIZES["small"], seed=5).place
    system = [
        number for number, types in enumerate(synthetic.ORGAN_SYSTEMS.values()) for _ in types
    ]
    distance = np.linalg.norm(place[:, np.newaxis] - place, axis=2)
    same = np.equal.outer(system, system)
    assert distance[same & (distance > 0)].mean() < 0.6 * distance[~same].mean()
