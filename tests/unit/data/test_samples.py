import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, StandardScaler

from candle_p1.data.samples import (
    Chained,
    Computed,
    Joined,
    Samples,
    Selected,
    Several,
    gather_of,
    pandas_sample,
)
from candle_p1.data.transforms import fill_missing, scale_features
from candle_p1.errors import ParameterError

X = np.arange(12.0).reshape(6, 2)
Y = np.arange(6)
ORDER = np.array([5, 0, 3, 3, 2, 1])
TABLES = np.arange(8, dtype="f4").reshape(4, 2), np.arange(30, 36, dtype="f4").reshape(2, 3)
CODES = np.array([3, 0, 3, 1, 2, 2]), np.array([0, 1, 1, 0, 1, 0], np.int32)
OWN = X[:, :1].astype("f4")
JOINED = np.concatenate([OWN, TABLES[0][CODES[0]], TABLES[1][CODES[1]]], axis=1)


@pytest.mark.parametrize("which", [slice(0, 0), slice(1, 5), slice(None), [5, 0, 3, 3], [-1]])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (Chained([X[:1], X[1:1], X[1:4], X[4:]]), X),
        (Selected(X, ORDER), X[ORDER]),
        (Computed(X, lambda rows: rows.astype(np.int32)[:, :1]), X[:, :1].astype(np.int32)),
        (Joined(OWN, CODES, TABLES), JOINED),
    ],
    ids=["chained", "selected", "computed", "joined"],
)
def test_rows_are_like_those_of_one_array(rows, expected, which):
    which = np.array(which) if isinstance(which, list) else which
    assert len(rows) == len(expected)
    np.testing.assert_array_equal(rows[which], expected[which])
    assert rows[which].dtype == expected.dtype


def test_several_inputs_are_a_tuple_and_several_outputs_have_names():
    samples = Samples(Several((X, Y)), Several({"first": X[:, 0], "number": Y}))
    assert len(samples) == 6
    (x, condition), y = samples[slice(1, 3)]
    np.testing.assert_array_equal(x, X[1:3])
    assert condition.tolist() == [1, 2]
    assert {name: part.tolist() for name, part in y.items()} == {"first": [2, 4], "number": [1, 2]}


def test_only_the_first_samples_are_taken():
    samples = Samples(X, Y)
    assert len(samples.first(4)) == 4
    assert samples.first(0) is samples.first(99) is samples
    assert samples.first(4).x_shape == samples.x_shape == (2,)
    np.testing.assert_array_equal(samples.first(2)[0:9][1], [0, 1])


def test_rows_that_are_their_own_targets_are_taken_once():
    taken = []
    rows = Computed(X, lambda rows: taken.append(len(rows)) or rows)
    for samples in (Samples(rows, rows), Samples(rows, rows).first(4)):
        x, y = samples[slice(0, 3)]
        assert x is y
    assert taken == [3, 3]


@given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_rows_are_those_that_pandas_samples(num_rows, fraction, seed):
    frame = pd.DataFrame({"row": range(num_rows)})
    expected = frame.sample(frac=fraction, random_state=seed)["row"].tolist()
    assert pandas_sample(num_rows, fraction, seed).tolist() == expected


LARGE = np.arange(60.0).reshape(10, 6)


@pytest.mark.parametrize(
    "rows",
    [
        LARGE,
        LARGE[2:, 1:],
        LARGE[:, 1:, np.newaxis],
        LARGE[:, ::2],
        LARGE[:, 0],
        Selected(LARGE[1:, 2:], np.array([3, 0, 7, 7])),
        Several((LARGE, Selected(LARGE, np.arange(4)))),
        Several({"a": LARGE[:4, :5], "b": np.arange(4)}),
        Joined(OWN, CODES, TABLES),
    ],
)
def test_a_gather_takes_the_rows(rows):
    which, gather = np.array([3, 1, 1]), gather_of(rows)
    taken, expected = gather.take(np, gather.arrays, which), rows[which]
    if isinstance(expected, np.ndarray):
        taken, expected = (taken,), (expected,)
    assert type(taken) is type(expected)
    pairs = zip(taken, expected, strict=True)
    if isinstance(expected, dict):
        pairs = ((taken[name], expected[name]) for name in expected)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_what_is_computed_on_the_host_has_no_gather():
    computed = Computed(LARGE, np.sqrt)
    for rows in (computed, Several((LARGE, computed)), Selected(computed, np.arange(3))):
        assert gather_of(rows) is None
    assert gather_of(np.array(["a"])) is None
    assert Samples(computed, LARGE).as_gather() is None


SCALERS = {"maxabs": MaxAbsScaler(), "minmax": MinMaxScaler(), "std": StandardScaler()}
matrices = arrays(
    np.float32,
    st.tuples(st.integers(2, 300), st.integers(1, 5)),
    elements=st.floats(-1000, 1000, width=32),
)


@pytest.mark.parametrize("scaling", SCALERS)
@given(both=matrices)
def test_matrices_are_scaled_together_in_place(scaling, both):
    expected = SCALERS[scaling].fit_transform(both.astype(np.float64))
    # Otherwise the subtraction cancels all digits.
    clear = both.std(axis=0, dtype=np.float64) > 1e-2
    scale_features(scaling, *np.array_split(both, 2))
    np.testing.assert_allclose(both[:, clear], expected[:, clear], atol=2e-2, rtol=1e-3)
    if scaling != "std":
        assert np.abs(both[:, clear]).max(initial=0) <= 1


def test_a_view_is_scaled_in_place_and_other_columns_are_kept():
    rows = np.array([[1, 10, -4], [0, 5, 8]], np.float32)
    scale_features("maxabs", rows[:, 1:])
    np.testing.assert_array_equal(rows, np.array([[1, 1, -0.5], [0, 0.5, 1]], np.float32))


@pytest.mark.parametrize("scaling", SCALERS)
@pytest.mark.parametrize("value", [0, 3, 0.1, -1e6])
def test_constant_columns_are_not_divided(scaling, value):
    rows = np.full((1000, 1), value, np.float32)
    expected = SCALERS[scaling].fit(rows.astype(np.float64)).scale_
    _, scale = scale_features(scaling, rows)
    np.testing.assert_allclose(scale, expected, rtol=1e-6)


def test_none_changes_nothing_and_an_unknown_scaling_is_an_error():
    rows = np.ones((2, 2), np.float32)
    scale_features("none", rows)
    assert (rows == 1).all()
    with pytest.raises(ParameterError, match="zscore"):
        scale_features("zscore", rows)


@pytest.mark.parametrize("scaling", SCALERS)
@given(both=matrices)
def test_scaling_can_be_fitted_to_the_training_rows(scaling, both):
    train, test = np.array_split(both.round(2), 2)
    alone = train.copy()
    scale_features(scaling, alone)
    scale_features(scaling, train, test, fit_to=[train])
    np.testing.assert_array_equal(train, alone)


def test_missing_values_become_the_mean_of_their_column():
    matrix = np.array([[1, np.nan, np.nan], [3, np.nan, 7], [np.nan, np.nan, 8]], np.float32)
    with pytest.warns(UserWarning, match="1"):  # the column without values
        expected = SimpleImputer().fit_transform(matrix)
    np.testing.assert_array_equal(fill_missing(matrix), expected)
