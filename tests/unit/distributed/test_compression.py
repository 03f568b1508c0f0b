"""Averages over thousands of simulated ranks, whose float16 values numpy adds as MPI does."""

import numpy as np
import pytest

from candle_p1.distributed.reducers.reducer import average_as_half, largest_element
from tests.conftest import NEEDS_HOROVOD

tf = pytest.importorskip("tensorflow", reason=NEEDS_HOROVOD)


def ring(values):
    """Adds the ranks' values one after the other."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def tree(values):
    """Adds them in pairs, as recursive halving does."""
    while len(values) > 1:
        half = len(values) // 2
        values = np.concatenate([values[:half] + values[half : 2 * half], values[2 * half :]])
    return values[0]


def averaged(everyone, add=tree):
    """Returns the average of all ranks' gradients, the rows, of which each is as large as any.

    All rows pass through the code at once, which treats each element alike.
    """

    def total(values):
        assert values.dtype == tf.float16
        with np.errstate(over="ignore", invalid="ignore"):
            return tf.constant(add(values.numpy()))

    result = average_as_half(tf.constant(everyone), len(everyone), lambda largest: largest, total)
    assert result.dtype == everyone.dtype
    return result.numpy()


def gradients_of(num_ranks, size, dtype=np.float32):
    """Returns random gradients, whose first element is equal on all ranks, and the largest."""
    everyone = np.random.default_rng(num_ranks).uniform(-size, size, (num_ranks, 30))
    everyone[:, 0] = size
    return everyone.astype(dtype)


@pytest.mark.parametrize("num_ranks", [2, 3, 48, 4096])
@pytest.mark.parametrize("size", [1e-20, 1e-9, 1e-5, 1.0, 50.0, 65_504.0, 1e20])
def test_averages_are_those_of_float64(num_ranks, size):
    everyone = gradients_of(num_ranks, size)
    expected = everyone.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(averaged(everyone), expected, atol=2e-3 * size)
    np.testing.assert_allclose(averaged(everyone)[0], expected[0], rtol=2e-3)
    # A ring's roundings grow with the number of ranks, but nothing overflows.
    assert (np.abs(averaged(everyone, ring)) <= size * 1.01).all()


def test_elements_much_smaller_than_the_largest_survive():
    everyone = np.full((4096, 3), [1.0, 2.0**-17, 2.0**-26], np.float32)
    np.testing.assert_array_equal(averaged(everyone)[:2], everyone[0, :2])
    assert averaged(everyone)[2] == pytest.approx(2.0**-26, rel=0.5)


def test_other_types_zeros_and_values_that_are_not_finite():
    for dtype in (np.float16, np.float64):
        everyone = gradients_of(8, 3.0, dtype)
        np.testing.assert_allclose(averaged(everyone), everyone.mean(axis=0), atol=6e-3)
    assert not averaged(np.zeros((8, 2), np.float32)).any()
    for bad in (np.inf, -np.inf, np.nan):
        everyone = gradients_of(8, 3.0)
        everyone[5, 2] = bad
        assert np.isfinite(averaged(everyone)).tolist() == [i != 2 for i in range(30)]
        assert largest_element(tf.constant(everyone)) == tf.float32.max
