from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from candle_p1.data.transforms import fill_missing, scale_features
from candle_p1.errors import ParameterError

matrices = st.integers(1, 5).flatmap(
    lambda columns: st.tuples(
        *[
            st.integers(1, 150).flatmap(
                lambda rows, columns=columns: arrays(
                    np.float32, (rows, columns), elements=st.floats(-1000, 1000, width=32)
                )
            )
            for _ in range(2)
        ]
    )
)


def reference(scaling, together):
    together = together.astype(np.float64)
    if scaling == "maxabs":
        offset, scale = 0, np.abs(together).max(axis=0)
    elif scaling == "minmax":
        offset, scale = together.min(axis=0), np.ptp(together, axis=0)
    else:
        offset, scale = together.mean(axis=0), together.std(axis=0)
    return (together - offset) / np.where(scale == 0, 1, scale), scale


@pytest.mark.parametrize("scaling", ["maxabs", "minmax", "std"])
@given(both=matrices)
def test_matrices_are_scaled_together_in_place(scaling, both):
    train, test = (matrix.copy() for matrix in both)
    expected, scale = reference(scaling, np.concatenate(both))
    scale_features(scaling, train, test)
    result = np.concatenate([train, test])
    assert result.dtype == np.float32
    clear = scale > 1e-2  # otherwise the subtraction cancels all digits of float32
    np.testing.assert_allclose(result[:, clear], expected[:, clear], atol=2e-2, rtol=1e-3)
    if scaling != "std":
        assert np.abs(result[:, clear]).max(initial=0) <= 1


def test_a_view_is_scaled_in_place_and_other_columns_are_kept():
    rows = np.array([[1, 10, -4], [0, 5, 8]], np.float32)
    scale_features("maxabs", rows[:, 1:])
    np.testing.assert_array_equal(rows, np.array([[1, 1, -0.5], [0, 0.5, 1]], np.float32))


def test_none_changes_nothing_and_an_unknown_scaling_is_an_error():
    rows = np.ones((2, 2), np.float32)
    scale_features("none", rows)
    assert (rows == 1).all()
    with pytest.raises(ParameterError, match="zscore"):
        scale_features("zscore", rows)


@pytest.mark.parametrize("scaling", ["maxabs", "minmax", "std"])
@given(both=matrices)
def test_scaling_can_be_fitted_to_the_training_rows(scaling, both):
    train, test = (matrix.round(2) for matrix in both)
    alone = train.copy()
    scale_features(scaling, alone)
    scale_features(scaling, train, test, fit_to=[train])
    np.testing.assert_array_equal(train, alone)


def test_missing_values_become_the_mean_of_their_column():
    matrix = np.array([[1, np.nan, np.nan], [3, np.nan, 7], [np.nan, np.nan, 8]], np.float32)
    filled = fill_missing(matrix)
    np.testing.assert_array_equal(filled, np.array([[1, 7.5], [3, 7], [2, 8]], np.float32))
