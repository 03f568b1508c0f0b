from __future__ import annotations

import numpy as np
import pytest

from candle_p1.data.samples import Chained, Computed, Samples, Selected, Several

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


def test_several_outputs_have_names():
    samples = Samples(X, Several({"first": X[:, 0], "number": Y}))
    assert len(samples) == 6
    _, y = samples[slice(1, 3)]
    assert {name: part.tolist() for name, part in y.items()} == {"first": [2, 4], "number": [1, 2]}


def test_rows_are_computed_for_each_batch():
    calls = []

    def compute(rows):
        calls.append(len(rows))
        return rows.astype(np.int32)[:, :1]

    rows = Computed(X, compute)
    assert len(rows) == 6
    assert rows[np.array([5, 0])].tolist() == [[10], [0]]
    assert calls == [2]
    assert rows[0:1].dtype == np.int32


@pytest.mark.parametrize("which", [slice(0, 0), slice(1, 5), slice(None), [5, 0, 3, 3], [-1]])
def test_chained_arrays_are_like_one(which):
    which = np.array(which) if isinstance(which, list) else which
    chained = Chained([X[:1], X[1:1], X[1:4], X[4:]])
    assert len(chained) == 6
    np.testing.assert_array_equal(chained[which], X[which])


def test_rows_that_are_their_own_targets_are_taken_once():
    taken = []
    rows = Computed(X, lambda rows: taken.append(len(rows)) or rows)
    for samples in (Samples(rows, rows), Samples(rows, rows).first(4)):
        x, y = samples[slice(0, 3)]
        assert x is y
    assert taken == [3, 3]
