from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

from candle_p1.benchmark import find_benchmark

pytestmark = pytest.mark.extended

NT3 = find_benchmark("nt3").recipe
synthetic = sys.modules[type(NT3).__module__]


@pytest.fixture(scope="module")
def small(small_data):
    """NT3's small data: (label, genes) of the training and the test file."""
    names = NT3.roles.values()
    tables = [np.loadtxt(small_data("nt3") / name, delimiter=",") for name in names]
    return [(table[:, 0], table[:, 1:]) for table in tables]


def test_classes_are_balanced_and_in_random_order(small):
    for (labels, genes), num_rows in zip(small, (280, 140), strict=True):
        assert genes.shape == (num_rows, 60)
        assert Counter(labels) == {0: num_rows // 2, 1: num_rows // 2}
        assert genes.min() == 0
        assert 10 < genes.max() <= 18
        assert len(set(labels[:20])) == 2


@pytest.mark.parametrize(("size", "num_patients"), [("small", 210), ("full", 700)])
def test_both_samples_of_a_patient_are_in_the_same_file(monkeypatch, size, num_patients):
    drawn = []

    def sample(genes, patient, tumor, seed):
        drawn.append((patient, tumor))
        return np.zeros(3)

    monkeypatch.setattr(synthetic.Genes, "sample", sample)
    sides = []
    for file in NT3.files(size, 1):
        drawn.clear()
        assert sum(block.count(b"\n") for block in file.blocks) == len(drawn)
        assert len(set(drawn)) == len(drawn) == 2 * len({patient for patient, _ in drawn})
        sides.append({patient for patient, _ in drawn})
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == num_patients


def test_the_two_samples_of_a_patient_are_similar():
    genes = synthetic.Genes.draw(synthetic.SIZES["full"], seed=1)
    variation = [
        [
            genes.sample(patient, tumor, 1) - genes.baseline - tumor * genes.response
            for tumor in (0, 1)
        ]
        for patient in range(10)
    ]
    likeness = np.corrcoef([v[0] for v in variation], [v[1] for v in variation])[:10, 10:]
    strangers = likeness[~np.eye(10, dtype=bool)]
    assert np.diag(likeness).min() > strangers.max()


def test_the_classes_can_be_learned(small):
    (train_labels, train), (test_labels, test) = small
    means = [train[train_labels == label].mean(axis=0) for label in (0, 1)]
    direction = means[1] - means[0]
    predicted = (test - sum(means) / 2) @ direction > 0
    assert (predicted == test_labels).mean() > 0.95
