from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from candle_p1.inference import metrics
from candle_p1.inference.metrics import (
    ClassMetrics,
    Ranking,
    RegressionMetrics,
    bootstrap,
    number_units,
    with_interval,
)
from candle_p1.models.scores import RegressionScore, as_probabilities


def ones(num):
    return np.ones((1, num))


def test_areas_and_points_of_a_table_with_ties():
    ranking = Ranking(np.array([0.3, 0.8, 0.9, 0.8]), np.array([False, True, True, False]))
    roc, precision = ranking.areas(ones(4))
    assert roc.tolist() == [3.5 / 4]  # of four pairs, one is a tie
    assert precision == pytest.approx([(1 + 2 / 3) / 2])
    points = ranking.points()
    assert points.thresholds.tolist() == [0.9, 0.8, 0.3]
    assert points.false_positive_rate.tolist() == [0, 0.5, 1]
    assert points.recall.tolist() == [0.5, 1, 1]
    assert points.precision.tolist() == [1, 2 / 3, 0.5]


def test_calibration_error_and_reliability_of_a_table():
    right = [True, False, True, True, False]
    largest = np.array([0.9, 0.95, 0.65, 0.6, 1.0])
    outputs = np.stack([largest, 1 - largest], axis=1)
    of_class = ClassMetrics(np.where(right, 0, 1), outputs, outputs)
    # Those of at least 0.9 are right once, instead of 2.85 times; the others twice instead of 1.25.
    assert of_class(ones(5))["ece"] == pytest.approx([(1.85 + 0.75) / 5])
    bins = of_class.reliability()
    assert [each["num_samples"] for each in bins] == [0, 0, 0, 0, 0, 0, 2, 0, 0, 3]
    assert bins[6]["accuracy"] == 1
    assert bins[6]["mean_probability"] == pytest.approx(0.625)
    assert bins[0]["accuracy"] is None
    by_chance = of_class.ece_if_calibrated(4000, seed=1)
    # The mean of |right - expected| over all outcomes of each bin; one case is certain.
    of_three = 0.1 * 0.05 * 1.85 + 0.1 * 0.95 * 0.85 + 0.9 * 0.05 * 0.85 + 0.9 * 0.95 * 0.15
    of_two = 0.35 * 0.4 * 1.25 + (0.35 * 0.6 + 0.65 * 0.4) * 0.25 + 0.65 * 0.6 * 0.75
    assert by_chance.mean() == pytest.approx((of_three + of_two) / 5, rel=0.05)


@given(st.integers(2, 5), st.integers(4, 40), st.integers(0, 2**32 - 1))
def test_weighted_metrics_equal_those_of_scikit_learn(num_classes, num, seed):
    random = np.random.default_rng(seed)
    true = np.r_[np.arange(num_classes), random.integers(num_classes, size=num)]
    outputs = np.round(random.random((len(true), num_classes)) + 0.05, 1)  # with ties
    p = outputs / outputs.sum(axis=1, keepdims=True)
    weights = random.integers(1, 4, size=(2, len(true))).astype(float)
    found = ClassMetrics(true, outputs, p)(weights)
    for i, w in enumerate(weights):
        predicted = outputs.argmax(axis=1)
        per_class = sk.precision_recall_fscore_support(
            true, predicted, labels=range(num_classes), sample_weight=w, zero_division=np.nan
        )
        expected = {
            "accuracy": sk.accuracy_score(true, predicted, sample_weight=w),
            "balanced_accuracy": sk.balanced_accuracy_score(true, predicted, sample_weight=w),
            "log_loss": sk.log_loss(true, p, sample_weight=w, labels=range(num_classes)),
            "brier": np.average(np.square(p - np.eye(num_classes)[true]).sum(1), weights=w),
            "class_precision": per_class[0],
            "class_recall": per_class[1],
            "class_auroc": [
                sk.roc_auc_score(true == c, p[:, c], sample_weight=w) for c in range(num_classes)
            ],
            "class_average_precision": [
                sk.average_precision_score(true == c, p[:, c], sample_weight=w)
                for c in range(num_classes)
            ],
        }
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][i], value, rtol=1e-9, err_msg=name)
        assert found["auroc"][i] == pytest.approx(np.mean(expected["class_auroc"]))


def test_perfect_and_constant_predictions():
    true = np.array([0, 0, 0, 1, 2, 2])
    perfect = ClassMetrics(true, np.eye(3)[true], np.eye(3)[true])
    found = perfect(ones(6))
    for name in ("accuracy", "macro_f1", "balanced_accuracy", "auroc", "average_precision"):
        assert found[name] == [1], name
    assert (found["ece"], found["brier"], found["log_loss"]) == ([0], [0], [0])
    assert perfect.confusion(ones(6)).sums[0].tolist() == [[3, 0, 0], [0, 1, 0], [0, 0, 2]]
    draws = bootstrap(np.arange(6), perfect, 100, seed=1)
    interval = with_interval(1.0, draws["accuracy"])
    assert interval == {"value": 1, "low": None, "high": None}  # not an interval of 1 to 1

    constant = np.tile([0.5, 0.3, 0.2], (6, 1))
    found = ClassMetrics(true, constant, constant)(ones(6))
    assert found["accuracy"] == [0.5]
    assert found["class_auroc"].tolist() == [[0.5] * 3]
    assert found["class_average_precision"] == pytest.approx(np.array([[3, 1, 2]]) / 6)
    assert found["balanced_accuracy"] == pytest.approx([1 / 3])
    np.testing.assert_array_equal(found["class_precision"], [[0.5, np.nan, np.nan]])


def test_classes_without_samples_have_no_recall_and_do_not_count_in_means():
    true, outputs = np.array([0, 0, 1]), np.array([[0.6, 0.3, 0.1]] * 2 + [[0.2, 0.3, 0.5]])
    found = ClassMetrics(true, outputs, outputs)(ones(3))
    np.testing.assert_array_equal(found["class_recall"], [[1, 0, np.nan]])
    np.testing.assert_array_equal(found["class_auroc"], [[1, 0.5, np.nan]])
    assert found["balanced_accuracy"] == [0.5]
    assert found["auroc"] == [0.75]


def test_sigmoids_become_the_probabilities_that_they_were_trained_as():
    logits = np.random.default_rng(1).normal(size=(5, 4))
    logits[0] = -20, -18, -19, -80
    logits[1] = 16, 15, 0, -16
    sigmoids, softmax = 1 / (1 + np.exp(-logits)), np.exp(logits)
    softmax /= softmax.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(as_probabilities(sigmoids, "sigmoid"), softmax)
    np.testing.assert_allclose(as_probabilities(softmax, "softmax"), softmax)
    relus = np.array([[2.0, 1, 1, 0], [0, 0, 0, 0]])
    expected = [[0.5, 0.25, 0.25, 0], [0.25] * 4]
    np.testing.assert_allclose(as_probabilities(relus, "relu"), expected)


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_drawing_units_is_repeating_their_samples(monkeypatch, num_outputs):
    random = np.random.default_rng(2)
    units = number_units([*"aabbbcdddd"], 10)
    true = random.normal(3, 1, (10, num_outputs))
    predicted = true + random.normal(size=true.shape)
    cutoffs = (3.0,) if num_outputs == 1 else None
    found = RegressionMetrics(units, num_outputs, cutoffs)
    found.update(true[:7], predicted[:7])
    found.update(true[7:], predicted[7:])
    score = RegressionScore(num_outputs)
    score.update(true[:7], predicted[:7])
    score.update(true[7:], predicted[7:])
    assert {name: found.values()[name][0] for name in score.result()} == score.result()
    draws = found.draws(5, seed=3)
    drawn = np.random.default_rng(3).integers(4, size=(5, 4))
    for i, chosen in enumerate(drawn):
        rows = np.concatenate([np.flatnonzero(units == unit) for unit in chosen])
        t, p = true[rows], predicted[rows]
        expected = {"mse": sk.mean_squared_error(t, p), "r2": sk.r2_score(t, p)}
        expected |= {"mae": sk.mean_absolute_error(t, p)}
        expected["correlation"] = np.corrcoef(t.ravel(), p.ravel())[0, 1]
        if cutoffs:
            expected["accuracy"] = ((t >= 3) == (p >= 3)).mean()
        assert {name: values[i] for name, values in draws.items()} == pytest.approx(expected)
    monkeypatch.setattr(metrics, "BLOCK_VALUES", 1)  # one draw at a time
    for name, values in found.draws(5, seed=3).items():
        np.testing.assert_allclose(values, draws[name])


def test_many_units_with_many_outputs_are_pooled_without_losing_a_sample(monkeypatch):
    monkeypatch.setattr(metrics, "POOLED_BYTES", 0)
    random = np.random.default_rng(4)
    true = random.normal(size=(1000, 2))
    predicted = true + random.normal(size=true.shape)
    found = RegressionMetrics(np.arange(1000), 2)
    found.update(true, predicted)
    assert set(np.bincount(found.pools)) == {1000 // metrics.LEAST_POOLS}
    spread = found.draws(2000, seed=5)["mse"].std()
    of_samples = np.square(predicted - true).mean(axis=1)
    assert spread == pytest.approx(of_samples.std() / np.sqrt(1000), rel=0.25)


def classified(random):
    true = random.integers(2, size=150)
    p = stats.norm.cdf(random.normal(true - 0.5))
    outputs = np.stack([1 - p, p], axis=1)
    of_class = ClassMetrics(true, outputs, outputs)
    return of_class(ones(150)), bootstrap(np.arange(150), of_class, 200, seed=1)


def miscalibrated(random):
    """Two classes, of which the model gives the right one 0.95 where it is right 4 times of 5."""
    is_right = random.random(300) < 0.8
    outputs = np.tile([0.95, 0.05], (300, 1))
    of_class = ClassMetrics(np.where(is_right, 0, 1), outputs, outputs)
    return of_class(ones(300)), bootstrap(np.arange(300), of_class, 200, seed=1)


def regressed(random, by_patient=True):
    """40 patients with five samples each, whose errors are similar."""
    patients = np.repeat(np.arange(40), 5)
    error = random.normal(size=40)[patients] + 0.3 * random.normal(size=200)
    true = random.normal(size=(200, 1))
    found = RegressionMetrics(patients if by_patient else np.arange(200), 1)
    found.update(true, true + error[:, np.newaxis])
    return found.values(), found.draws(200, seed=1)


@pytest.mark.parametrize(
    ("make", "name", "truth", "least", "most"),
    [
        (classified, "accuracy", stats.norm.cdf(0.5), 0.7, 0.9),
        (classified, "class_auroc", stats.norm.cdf(1 / np.sqrt(2)), 0.7, 0.9),
        (miscalibrated, "ece", 0.15, 0.7, 0.9),
        (regressed, "mse", 1.09, 0.7, 0.9),
        # Drawing the samples of a patient one by one would claim too much.
        (partial(regressed, by_patient=False), "mse", 1.09, 0, 0.65),
    ],
)
def test_intervals_of_80_percent_have_the_truth_in_them_as_often(make, name, truth, least, most):
    random, hits = np.random.default_rng(6), 0
    for _ in range(200):
        values, draws = make(random)
        of_first = values[name].ravel()[0], draws[name].reshape(200, -1)[:, 0]
        found = with_interval(*of_first, 0.8, is_biased=name == "ece")
        hits += found["low"] <= truth <= found["high"]
    assert least < hits / 200 < most
