from __future__ import annotations

import numpy as np

from candle_p1.data.samples import Samples, Selected, Several

X = np.arange(12.0).reshape(6, 2)
Y = np.arange(6)


def test_a_batch_is_taken_by_indices_or_by_a_slice():
    samples = Samples(X, Y)
    for which in (np.array([1, 2]), slice(1, 3)):
        x, y = samples[which]
        np.testing.assert_array_equal(x, X[1:3])
        assert y.tolist() == [1, 2]


def test_selected_rows_have_their_own_order():
    rows = Selected(X, np.array([5, 0, 3]))
    assert len(rows) == 3
    np.testing.assert_array_equal(rows[1:], X[[0, 3]])
    np.testing.assert_array_equal(rows[np.array([2, 0])], X[[3, 5]])


def test_several_inputs_give_a_tuple():
    samples = Samples(Several((X, Y)), Y)
    (x, condition), _ = samples[np.array([4])]
    assert x.tolist() == [[8, 9]]
    assert condition.tolist() == [4]


def test_only_the_first_samples_are_taken():
    samples = Samples(X, Y)
    assert len(samples.first(4)) == 4
    assert samples.first(0) is samples.first(99) is samples
    assert samples.first(4).x_shape == samples.x_shape == (2,)
    np.testing.assert_array_equal(samples.first(2)[0:9][1], [0, 1])
