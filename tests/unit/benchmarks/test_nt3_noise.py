"""NT3's noise on the training samples."""

import sys

import numpy as np
import pytest

from candle_p1.benchmark import Samples, find_benchmark
from candle_p1.errors import ParameterError

NT3 = find_benchmark("nt3")
noise = sys.modules["nt3_noise"]
NUM_SAMPLES = 2000


def samples():
    """Gene 1 is 0.5 in the first half of the samples; all other values are 0."""
    x = np.zeros((NUM_SAMPLES, 3, 1), np.float32)
    x[: NUM_SAMPLES // 2, 1] = 0.5
    return Samples(x, np.eye(2, dtype=np.float32)[np.arange(NUM_SAMPLES) % 2])


def changes(flags):
    """Returns which labels are flipped, and what is added to the genes: the same each time."""
    params, plain, found = NT3.read_parameters(flags.split()), samples(), []
    for _ in range(2):
        noisy = samples()
        noise.add_noise(noisy, params)
        np.testing.assert_array_equal(noisy.y[:].sum(axis=1), 1)
        added = (noisy.x[:] - plain.x[:])[:, :, 0]
        found.append(((noisy.y[:] != plain.y[:]).any(axis=1), added))
    np.testing.assert_equal(*found)
    return found[0]


HALF = np.arange(NUM_SAMPLES) < NUM_SAMPLES // 2
CORRELATED = "--label_noise 1 --noise_correlated True --feature_threshold"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{CORRELATED} 0.1 --feature_col 1", HALF),  # above the threshold of a gene
        (f"{CORRELATED} -0.1 --feature_col 0 2", HALF & ~HALF),  # twice, gene after gene
        (f"{CORRELATED} -0.1 --feature_col 0 1 2", HALF | ~HALF),
        ("--label_noise 1", HALF | ~HALF),
        ("--label_noise 0.25", None),
    ],
)
def test_labels_of_some_samples_are_flipped(flags, expected):
    flipped, added = changes(f"--add_noise 1 {flags}")
    assert not added.any()
    if expected is None:
        assert flipped.sum() == pytest.approx(0.25 * NUM_SAMPLES, rel=0.15)
    else:
        np.testing.assert_array_equal(flipped, expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--add_noise 1 --noise_correlated 1 --feature_col 0 3", r"feature_col 3 \(flag\): .* 2$"),
        ("--noise_column 1 --feature_col 3", r"feature_col 3 \(flag\): .* 2$"),
        ("--noise_cluster 1 --sample_ids 7 2000 --feature_col 0", r"sample_ids 2000 .* 1999$"),
        ("--noise_cluster 1 --feature_col 0", r"sample_ids None \(default\)"),
    ],
)
def test_genes_and_samples_that_do_not_exist_are_refused(flags, message):
    with pytest.raises(ParameterError, match=message):
        changes(flags)


@pytest.mark.parametrize(
    ("flags", "deviation", "changed"),
    [
        ("--noise_gaussian 1", 0.2, [0, 1, 2]),
        ("--noise_column 1 --noise_type gaussian --feature_col 2 0", 0.2, [0, 2]),
        ("--noise_column 1 --noise_type uniform --feature_col 2 0", 0.2 / 3**0.5, [0, 2]),
    ],
)
def test_noise_on_genes_changes_these_genes_of_all_samples(flags, deviation, changed):
    flipped, added = changes(f"{flags} --std_dev 0.2")
    assert not flipped.any()
    assert np.flatnonzero(added.any(axis=0)).tolist() == changed
    assert added[:, changed].std() == pytest.approx(deviation, rel=0.05)
    assert abs(added.mean()) < 0.02
    assert abs(np.corrcoef(added[:, 0], added[:, 2])[0, 1]) < 0.1
    assert ("uniform" in flags) == (np.abs(added).max() <= 0.2)


def test_noise_on_a_cluster_changes_genes_of_a_fraction_of_the_listed_samples():
    listed = range(0, NUM_SAMPLES, 4)
    flags = "--noise_cluster True --feature_col 1 2 --label_noise 0.25 --sample_ids "
    _, added = changes(flags + " ".join(map(str, listed)))
    changed = np.flatnonzero(added.any(axis=1))
    assert set(changed) <= set(listed)
    assert len(changed) == pytest.approx(0.25 * len(listed), rel=0.25)
    assert not added[:, 0].any()
    assert (added[changed, 1] != 0).all()
    assert added[changed].std(axis=0)[1:] == pytest.approx([0.5, 0.5], rel=0.25)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", None),
        ("--add_noise 1 --noise_gaussian 1 --noise_cluster 1 --noise_column 1", "labels"),
        ("--add_noise 1 --label_noise 0", None),
        ("--add_noise 1 --label_noise 0 --noise_gaussian 1 --noise_column 1", "all"),
        ("--add_noise 1 --label_noise 0 --noise_column 1", "column"),
        ("--add_noise 1 --label_noise 0 --noise_cluster 1 --noise_column 1 --sample_ids 3", None),
        ("--noise_cluster 1 --noise_column 1 --label_noise 1 --sample_ids 3", "sample"),
    ],
)
def test_the_kinds_of_noise_have_candles_precedence(flags, kind):
    flipped, added = changes(f"--feature_col 1 {flags}")
    found = {0: None, 1: "sample", NUM_SAMPLES: "column", 3 * NUM_SAMPLES: "all"}
    assert ("labels" if flipped.any() else found[np.count_nonzero(added)]) == kind
    assert not (flipped.any() and added.any())


@pytest.mark.parametrize("flags", ["--add_noise 1", "--noise_gaussian 1"])
def test_noise_affects_only_the_training_samples(flags):
    values = np.random.default_rng(1).random((2, 40, 3))
    rows = {
        role: np.insert(each, 0, np.arange(40) % 2, axis=1).astype(np.float32)
        for role, each in zip(("train", "test"), values, strict=True)
    }
    noisy, plain = (
        NT3.preprocess(
            {role: each.copy() for role, each in rows.items()}, NT3.read_parameters(argv)
        )
        for argv in (flags.split(), [])
    )
    assert any((a != b).any() for a, b in zip(noisy.train[:], plain.train[:], strict=True))
    np.testing.assert_equal(noisy.test[:], plain.test[:])
