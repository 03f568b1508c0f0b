from __future__ import annotations

import sys

import numpy as np
import pytest

from candle_p1.benchmark import Samples, find_benchmark
from candle_p1.errors import ParameterError

NT3 = find_benchmark("nt3")
noise = sys.modules["nt3_noise"]
NUM_SAMPLES = 2000


def params_for(*flags):
    return NT3.read_parameters(flags)


def samples():
    x = np.zeros((NUM_SAMPLES, 3, 1), np.float32)
    x[: NUM_SAMPLES // 2, 1] = 0.5
    return Samples(x, np.eye(2, dtype=np.float32)[np.arange(NUM_SAMPLES) % 2])


def test_a_fraction_of_the_labels_is_flipped():
    noisy = samples()
    count = noise.flip_labels(noisy, params_for("--label_noise", "0.25"))
    flipped = (noisy.y[:] != samples().y[:]).any(axis=1)
    assert flipped.sum() == count
    assert count == pytest.approx(0.25 * NUM_SAMPLES, rel=0.15)
    np.testing.assert_array_equal(noisy.y[:].sum(axis=1), 1)
    again = samples()
    noise.flip_labels(again, params_for("--label_noise", "0.25"))
    np.testing.assert_array_equal(again.y[:], noisy.y[:])


def test_correlated_noise_flips_only_labels_above_the_threshold_of_a_gene():
    noisy = samples()
    flags = ["--noise_correlated", "True", "--feature_col", "1", "--feature_threshold", "0.1"]
    noise.flip_labels(noisy, params_for("--label_noise", "1", *flags))
    flipped = (noisy.y[:] != samples().y[:]).any(axis=1)
    assert flipped[: NUM_SAMPLES // 2].all()
    assert not flipped[NUM_SAMPLES // 2 :].any()
    with pytest.raises(ParameterError, match=r"feature_col 3 \(flag\): .* 2$"):
        noise.flip_labels(samples(), params_for("--noise_correlated", "1", "--feature_col", "3"))


def test_gaussian_noise_has_the_requested_deviation():
    noisy = samples()
    noise.add_gaussian_noise(noisy, params_for("--std_dev", "0.2"))
    added = noisy.x[:] - samples().x[:]
    assert added.std() == pytest.approx(0.2, rel=0.05)
    assert abs(added.mean()) < 0.02


def test_noise_affects_only_the_training_samples():
    random = np.random.default_rng(1)
    rows = {
        role: np.hstack([np.arange(40)[:, None] % 2, random.random((40, 3))]).astype(np.float32)
        for role in ("train", "test")
    }
    plain = NT3.preprocess({role: rows[role].copy() for role in rows}, params_for())
    for flag in ("--add_noise", "--noise_gaussian"):
        raw = {role: rows[role].copy() for role in rows}
        noisy = NT3.preprocess(raw, params_for(flag, "True"))
        assert not all(
            np.array_equal(a[:], b[:])
            for a, b in ((noisy.train.x, plain.train.x), (noisy.train.y, plain.train.y))
        )
        np.testing.assert_array_equal(noisy.test.x[:], plain.test.x[:])
        np.testing.assert_array_equal(noisy.test.y[:], plain.test.y[:])
