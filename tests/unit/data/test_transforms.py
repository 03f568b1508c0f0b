import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, StandardScaler

from candle_p1.data.transforms import fill_missing, scale_features
from candle_p1.errors import ParameterError

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
