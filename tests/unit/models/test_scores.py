import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn import metrics

from candle_p1.models.scores import ConfusionScore, RegressionScore

values = st.floats(-10, 10, width=32)
tables = st.tuples(st.integers(1, 12), st.integers(1, 4)).flatmap(
    lambda shape: st.tuples(*[arrays(np.float32, shape, elements=values) for _ in range(2)])
)


def in_two_parts(make, y_true, y_pred, cut):
    """The score of two ranks, of which the second has two batches, with their sums added."""
    first, second = make(), make()
    first.update(y_true[:cut], y_pred[:cut])
    second.update(y_true[cut : cut + 1], y_pred[cut : cut + 1])
    second.update(y_true[cut + 1 :], y_pred[cut + 1 :])
    first.sums = first.sums + second.sums
    return first


@given(tables, st.integers(0, 12))
def test_regression_scores_equal_those_of_scikit_learn(table, cut):
    y_true, y_pred = (values.astype(np.float64) for values in table)
    score = in_two_parts(lambda: RegressionScore(y_true.shape[1]), y_true, y_pred, cut).result()
    assert score["mse"] == pytest.approx(metrics.mean_squared_error(y_true, y_pred), abs=1e-6)
    spread = y_true.std(axis=0)
    if len(y_true) > 1 and (spread > 1e-2).all():
        assert score["r2"] == pytest.approx(metrics.r2_score(y_true, y_pred), rel=1e-5, abs=1e-5)
    if y_true.std() > 1e-2 and y_pred.std() > 1e-2:
        expected = np.corrcoef(y_true.ravel(), y_pred.ravel())[0, 1]
        assert score["correlation"] == pytest.approx(expected, abs=1e-6)


def test_r2_of_constant_outputs_equals_that_of_scikit_learn():
    y_true = np.array([[1.0, 2, 3], [1, 2, 4]])
    y_pred = np.array([[1.0, 5, 3], [1, 2, 4]])
    score = RegressionScore(3)
    score.update(y_true, y_pred)
    assert score.result()["r2"] == pytest.approx(metrics.r2_score(y_true, y_pred)) == 2 / 3


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1), st.integers(0, 9))
def test_classification_scores_equal_those_of_scikit_learn(pairs, cut):
    true, predicted = (np.array(labels) for labels in zip(*pairs, strict=True))
    one_hot = np.eye(4)
    score = in_two_parts(lambda: ConfusionScore(4), one_hot[true], one_hot[predicted], cut)
    macro_f1 = metrics.f1_score(true, predicted, average="macro")
    assert score.result() == pytest.approx(
        {"accuracy": metrics.accuracy_score(true, predicted), "macro_f1": macro_f1}
    )
    expected = metrics.precision_recall_fscore_support(
        true, predicted, labels=range(4), zero_division=0
    )
    for ours, theirs in zip(score.per_class().values(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs)


def test_scores_without_predictions_are_nan():
    for score in (RegressionScore(2), ConfusionScore(2)):
        assert np.isnan(next(iter(score.result().values())))


@given(tables, st.integers(0, 12))
def test_a_constant_prediction_is_scored_without_predicting(table, cut):
    y_true, y_pred = (values.astype(np.float64) for values in table)
    constant = y_pred[0]
    score = in_two_parts(lambda: RegressionScore(y_true.shape[1]), y_true, y_pred, cut)
    expected = RegressionScore(y_true.shape[1])
    expected.update(y_true, np.broadcast_to(constant, y_true.shape))
    np.testing.assert_allclose(score.of_constant(constant).sums, expected.sums, atol=1e-9)


def test_classes_are_given_as_numbers_or_one_hot():
    labels, predicted = np.array([0, 2, 2, 1]), np.eye(3)[[0, 2, 1, 1]]
    of_forms = []
    for true in (labels, labels.astype(np.float32), labels[:, np.newaxis], np.eye(3)[labels]):
        score = ConfusionScore(3)
        score.update(true, predicted)
        of_forms.append(score.sums.tolist())
    assert of_forms == [[[1, 0, 0], [0, 1, 0], [0, 1, 1]]] * 4
    constant = score.of_constant(2)
    assert constant.sums.tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, 2]]
    assert constant.result()["accuracy"] == 0.5
