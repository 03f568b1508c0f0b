from fractions import Fraction
from itertools import pairwise
from math import ceil, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.errors import ParameterError
from candle_p1.scaling import (
    ScalingPlan,
    continued_learning_rate,
    remaining_epochs,
    scale_batch_size,
    share_bounds,
    warmup_learning_rate,
)

ranks = st.integers(1, 5000)
NT3 = {"epochs": 384, "batch_size": 20, "learning_rate": 0.001, "num_samples": 1120}


def plan_of(num_ranks, **options):
    return ScalingPlan.make(num_ranks=num_ranks, **NT3 | options)


@given(
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.sampled_from([("linear", 1), ("sqrt", 2), ("cbrt", 3)]),
)
def test_scaled_batch_size_is_the_integer_part_of_the_root(batch_size, num_ranks, scaling):
    name, power = scaling
    scaled = scale_batch_size(batch_size, num_ranks, name)
    exact = batch_size**power * num_ranks
    assert prod([scaled] * power) <= exact < prod([scaled + 1] * power)
    assert scale_batch_size(batch_size, num_ranks**power, name) == batch_size * num_ranks


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 16), ("sqrt", 4)])
def test_the_learning_rate_is_scaled(scaling, factor):
    plan = plan_of(16, epochs_scaling="weak", lr_scaling=scaling)
    assert plan.learning_rate == pytest.approx(factor * 0.001)


@given(st.integers(0, 5000), ranks)
def test_shares_are_contiguous_complete_and_even(num_items, num_ranks):
    bounds = [share_bounds(num_items, rank, num_ranks) for rank in range(num_ranks)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_items
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = {stop - start for start, stop in bounds}
    assert max(sizes) - min(sizes) <= 1


P1B3 = {"epochs": 1, "batch_size": 100, "num_samples": 900_100, "batch_scaling": "cbrt"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("strong", 8, 20, 56, 1120)),
        (P1B3 | {"drop_remainder": True}, ("none", 1, 363, 2479, 2479 * 363)),
    ],
)
def test_the_papers_runs_on_48_gpus(options, expected):
    plan = plan_of(48, **options)
    names = "epochs_scaling epochs_per_rank batch_size steps_per_epoch samples_per_epoch"
    assert tuple(getattr(plan, name) for name in names.split()) == expected
    assert plan.learning_rate == pytest.approx(0.048)
    for part in ("48 ranks", f"{expected[3]} steps", f"{expected[2]}", "0.048 (0.001, linear)"):
        assert part in plan.explain()


@given(
    st.integers(1, 2000),
    ranks,
    st.sampled_from(["strong", "strong_ceil", "weak", "none", None]),
    st.sampled_from(["epoch", "batch_step"]),
)
def test_epochs_per_rank(epochs, num_ranks, scaling, level):
    options = {"epochs": epochs, "num_samples": 5000}
    options |= {"epochs_scaling": scaling, "data_parallel": level}
    strong = scaling == "strong" or (scaling is None and level == "epoch" and epochs > 1)
    if strong and epochs % num_ranks:
        nearest = {epochs // num_ranks * num_ranks, ceil(epochs / num_ranks) * num_ranks} - {0}
        with pytest.raises(ParameterError) as raised:
            plan_of(num_ranks, **options)
        given_ranks = (
            f"{epochs // num_ranks} to most and {epochs // num_ranks + epochs % num_ranks}"
        )
        assert given_ranks in str(raised.value)
        assert all(f"--epochs {num}" in str(raised.value) for num in nearest)
        return
    plan = plan_of(num_ranks, **options)
    expected = {"strong": epochs // num_ranks, "strong_ceil": ceil(epochs / num_ranks)}
    assert plan.epochs_per_rank == expected.get(plan.epochs_scaling, epochs)


@given(
    st.integers(1, 5000),
    st.integers(1, 300),
    st.integers(1, 64),
    st.integers(0, 50),
    st.booleans(),
    st.sampled_from(["epoch", "batch_step"]),
)
def test_all_ranks_take_the_same_steps(samples, batch, num_ranks, limit, drops, level):
    options = {"epochs": num_ranks, "batch_size": batch, "num_samples": samples}
    options |= {"max_steps": limit, "drop_remainder": drops, "data_parallel": level}
    own = samples // num_ranks if level == "batch_step" else samples
    steps = own // batch if drops else ceil(Fraction(own, batch))
    if steps == 0:
        with pytest.raises(ParameterError, match="batch_step" if own == 0 else "batch_size"):
            plan_of(num_ranks, **options)
        return
    plan = plan_of(num_ranks, **options)
    steps = min(steps, limit or steps)
    assert (plan.steps_per_epoch, plan.samples_per_epoch) == (steps, min(own, steps * batch))


def test_warmup_rises_linearly_to_the_scaled_learning_rate():
    plan = plan_of(8, warmup_epochs=2)
    rates = [warmup_learning_rate(plan, step) for step in range(3 * plan.steps_per_epoch)]
    assert rates[0] == pytest.approx(0.001)
    assert rates[56] == pytest.approx(0.0045)  # half way
    assert set(rates[112:]) == {0.008}
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("num_ranks", "options", "said"),
    [
        (1, {"warmup_epochs": 1}, ["0.001"]),  # raises nothing
        (1, {"warmup_epochs": 1, "warmup_from": 1e-5}, []),
        (2, {"warmup_epochs": 1}, []),
        (96, {"warmup_epochs": 5}, ["5 epochs"]),  # longer than training, of 4 epochs
    ],
)
def test_a_warmup_without_the_expected_effect_is_said(num_ranks, options, said):
    warnings = plan_of(num_ranks, **options).warnings
    assert len(warnings) == len(said)
    assert all(part in warning for part, warning in zip(said, warnings, strict=True))


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(10, 90),
    st.sampled_from(["strong", "weak", "none"]),
    st.data(),
)
def test_other_ranks_train_what_a_checkpoint_has_left(saved_by, ranks, epochs, samples, kind, data):
    """Whole epochs, and not one more than are needed."""
    epochs *= saved_by if kind == "strong" else 1
    options = {"epochs": epochs, "batch_size": 10, "num_samples": samples}
    plan = plan_of(saved_by, epochs_scaling=kind, **options)
    epoch = data.draw(st.integers(0, plan.epochs_per_rank))
    is_last = epoch == plan.epochs_per_rank
    step = data.draw(st.integers(0, 0 if is_last else plan.steps_per_epoch - 1))
    left = remaining_epochs(plan, ranks, epoch, step)
    done = epoch + Fraction(step, plan.steps_per_epoch)
    old, new = (saved_by, ranks) if kind == "strong" else (1, 1)
    needed = old * (plan.epochs_per_rank - done)
    assert left * new >= needed > (left - 1) * new
    assert (left == 0) == is_last
    if epoch + left:
        made = plan_of(ranks, epochs_per_rank=epoch + left, epochs_scaling=kind, **options)
        assert (made.epochs_scaling, made.epochs_per_rank) == (kind, epoch + left)


def test_a_reduced_learning_rate_stays_reduced_at_another_number_of_ranks():
    saved, plan = plan_of(2), plan_of(4)
    assert continued_learning_rate(saved.learning_rate, saved, plan) == plan.learning_rate
    reduced = continued_learning_rate(saved.learning_rate / 10, saved, plan)
    assert reduced == pytest.approx(plan.learning_rate / 10)
