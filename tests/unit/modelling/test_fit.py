"""Least squares without negative coefficients, and the choice between candidates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from candle_p1.modelling.fit import fit_phase, nonnegative_least_squares
from candle_p1.modelling.laws import ModelTerm
from tests.modelled_runs import shape_of

RANKS = np.array([1.0, 1, 2, 2, 4, 4])
ONE = ModelTerm("one", "s", lambda s: 1)
LINEAR = ModelTerm("linear", "s", lambda s: s.num_ranks)
ALIKE = ModelTerm("alike", "s", lambda s: s.num_ranks + (s.num_ranks > 2))
TRIED = [(ONE,), (LINEAR,), (ONE, LINEAR)]


def fitted(values, tried=TRIED):
    shapes = [shape_of(int(num)) for num in RANKS[: np.shape(values)[-1]]]
    random = np.random.default_rng(0)
    return fit_phase("x", tried, shapes, np.atleast_2d(values), np.ones(len(shapes)), random)


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
    [(np.full(6, 3.0), 0, [3.0]), (2 * RANKS, 1, [2.0]), (5 + 2 * RANKS, 2, [5.0, 2.0])],
)
def test_the_candidate_that_extrapolates_is_chosen(values, choice, coefficients):
    found = fitted(values + np.array([1, -1, 1, -1, 1, -1]) * 1e-3)
    assert found.chosen == TRIED[choice]
    assert found.coefficients[choice][0] == pytest.approx(coefficients, abs=1e-2)
    expected = values[-1] + 4 * (values[-1] - values[0]) / 3
    assert found.at(shape_of(8))[0] == pytest.approx(expected, abs=0.02)


def test_candidates_that_these_runs_do_not_determine_are_left_out():
    found = fitted([4.0, 5.0], [(ONE, LINEAR), (ONE,)])
    assert found.coefficients[0] is None
    assert found.chosen == (ONE,)


def test_samples_choose_at_random_between_what_cannot_be_told_apart():
    # Both are the same at the sizes that ran, and differ elsewhere.
    found = fitted(np.tile([2.0, 2.1, 4.0, 4.1], (400, 1)), [(LINEAR,), (ALIKE,)])
    assert found.choices[0] == 0
    assert found.rivals == [(ALIKE,)]
    assert 0.4 < found.choices.mean() < 0.6
    assert len(np.unique(found.at(shape_of(8)).round(6))) == 2
