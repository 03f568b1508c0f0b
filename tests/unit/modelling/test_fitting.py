"""Least squares without negative coefficients, and the choice between candidates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from candle_p1.modelling.fitting import choose, nonnegative_least_squares

COUNTS = np.array([1.0, 1, 2, 2, 4, 4])
SIZES = np.array([0, 0, 1, 1, 2, 2])
CONSTANT = np.ones((6, 1))
LINEAR = COUNTS[:, None]
BOTH = np.stack([np.ones(6), COUNTS], axis=1)


def chosen(values, designs=(CONSTANT, LINEAR, BOTH), sizes=SIZES):
    return choose(designs, np.atleast_2d(values), sizes, np.random.default_rng(0))


@settings(max_examples=60, deadline=None)
@given(
    design=st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=5, max_size=8),
    data=st.data(),
)
def test_the_solution_meets_the_conditions_of_the_optimum(design, data):
    design = np.array(design)
    if np.linalg.svd(design, compute_uv=False)[-1] < 1e-3:
        return
    values = np.array([data.draw(st.floats(-5, 5)) for _ in design])
    found = nonnegative_least_squares(design, values[None, :])[0]
    gradient = design.T @ (design @ found - values)
    # Karush-Kuhn-Tucker: no coefficient can be moved to lessen the error.
    assert (found >= 0).all()
    assert gradient[found > 0] == pytest.approx(0, abs=1e-6)
    assert (gradient[found == 0] >= -1e-6).all()


@pytest.mark.parametrize(
    ("values", "choice", "coefficients"),
    [
        (np.full(6, 3.0), 0, [3.0]),
        (2 * COUNTS, 1, [2.0]),
        (5 + 2 * COUNTS, 2, [5.0, 2.0]),
    ],
)
def test_the_candidate_that_extrapolates_is_chosen(values, choice, coefficients):
    found = chosen(values + np.array([1, -1, 1, -1, 1, -1]) * 1e-3)
    assert found.choices[0] == choice
    assert found.coefficients[choice][0] == pytest.approx(coefficients, abs=1e-2)
    rows = [np.array([1.0]), np.array([8.0]), np.array([1.0, 8.0])]
    expected = float(np.array(coefficients) @ rows[choice])
    assert found.values(rows)[0] == pytest.approx(expected, abs=0.02)


def test_candidates_that_these_runs_do_not_determine_are_left_out():
    alone = np.array([0, 0])
    found = chosen([4.0, 5.0], [BOTH[:2], CONSTANT[:2]], alone)
    assert found.coefficients[0] is None
    assert found.choices[0] == 1
    with pytest.raises(ValueError, match="no candidate"):
        chosen([4.0, 5.0], [BOTH[:2]], alone)


def test_samples_choose_at_random_between_what_cannot_be_told_apart():
    # Both are the same at the sizes that ran, and differ elsewhere.
    values = np.tile([2.0, 2.1, 4.0, 4.1], (400, 1))
    designs = [COUNTS[:4, None], COUNTS[:4, None].copy()]
    found = choose(designs, values, SIZES[:4], np.random.default_rng(0))
    assert found.choices[0] == 0
    assert found.alike() == [0, 1]
    assert 0.4 < found.choices.mean() < 0.6
