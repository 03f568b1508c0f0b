from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.errors import ParameterError
from candle_p1.scaling import (
    ScalingPlan,
    comp_epochs,
    continued_learning_rate,
    remaining_epochs,
    scale_batch_size,
    scale_learning_rate,
    share_bounds,
    warmup_learning_rate,
)

ranks = st.integers(1, 5000)
NT3 = {"epochs": 384, "batch_size": 20, "learning_rate": 0.001, "num_samples": 1120}


@given(st.integers(0, 10_000), ranks)
def test_comp_epochs_shares_all_epochs_and_the_last_rank_takes_the_remainder(n, nprocs):
    shares = [comp_epochs(n, rank, nprocs) for rank in range(nprocs)]
    assert sum(shares) == n
    assert set(shares[:-1]) <= {n // nprocs}
    assert shares[-1] == n // nprocs + n % nprocs


def test_batch_size_of_the_papers_best_p1b3_run():
    assert scale_batch_size(100, 48, "cbrt") == 363


@given(st.integers(1, 10_000), st.integers(1, 40))
def test_exact_roots_stay_exact(batch_size, root):
    assert scale_batch_size(batch_size, root**3, "cbrt") == batch_size * root
    assert scale_batch_size(batch_size, root**2, "sqrt") == batch_size * root


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from([("sqrt", 2), ("cbrt", 3)]))
def test_scaled_batch_size_is_the_integer_part_of_the_root(batch_size, num_ranks, scaling):
    name, power = scaling
    scaled = scale_batch_size(batch_size, num_ranks, name)
    exact = batch_size**power * num_ranks
    assert prod([scaled] * power) <= exact < prod([scaled + 1] * power)


@pytest.mark.parametrize(
    ("scaling", "expected"), [("none", 0.001), ("linear", 0.016), ("sqrt", 0.004)]
)
def test_the_learning_rate_is_scaled(scaling, expected):
    assert scale_learning_rate(0.001, 16, scaling) == pytest.approx(expected)


@given(st.integers(0, 5000), ranks)
def test_shares_are_contiguous_complete_and_even(num_items, num_ranks):
    bounds = [share_bounds(num_items, rank, num_ranks) for rank in range(num_ranks)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_items
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = {stop - start for start, stop in bounds}
    assert max(sizes) - min(sizes) <= 1


def test_the_papers_nt3_on_48_gpus():
    plan = ScalingPlan.make(num_ranks=48, **NT3)
    assert (plan.epochs_per_rank, plan.batch_size, plan.steps_per_epoch) == (8, 20, 56)
    assert plan.learning_rate == pytest.approx(0.048)


def test_uneven_epochs_are_refused_with_the_two_nearest_counts():
    with pytest.raises(ParameterError, match=r"--epochs 14 .*--epochs 16.*strong_ceil"):
        ScalingPlan.make(num_ranks=2, **NT3 | {"epochs": 15})
    with pytest.raises(ParameterError, match="--epochs 4"):
        ScalingPlan.make(num_ranks=4, **NT3 | {"epochs": 3})


def test_the_papers_p1b3_has_one_epoch_for_every_rank():
    plan = ScalingPlan.make(
        num_ranks=48,
        epochs=1,
        batch_size=100,
        learning_rate=0.001,
        num_samples=900_100,
        batch_scaling="cbrt",
        whole_batches=True,
    )
    assert (plan.epochs_scaling, plan.epochs_per_rank, plan.batch_size) == ("none", 1, 363)
    assert (plan.steps_per_epoch, plan.samples_per_epoch) == (2479, 2479 * 363)
    for part in ("48 ranks", "2479 steps", "363 (100, cbrt)", "0.048 (0.001, linear)"):
        assert part in plan.explain()


@given(
    st.integers(1, 2000),
    ranks,
    st.sampled_from(["strong", "strong_ceil", "weak", "none", None]),
    st.sampled_from(["epoch", "batch_step"]),
)
def test_epochs_per_rank(epochs, num_ranks, scaling, level):
    options = NT3 | {"num_ranks": num_ranks, "epochs": epochs, "num_samples": 5000}
    options |= {"epochs_scaling": scaling, "data_parallel": level}
    strong = scaling == "strong" or (scaling is None and level == "epoch" and epochs > 1)
    if strong and epochs % num_ranks:
        with pytest.raises(ParameterError, match=str(ceil(epochs / num_ranks) * num_ranks)):
            ScalingPlan.make(**options)
        return
    plan = ScalingPlan.make(**options)
    expected = {"strong": epochs // num_ranks, "strong_ceil": ceil(epochs / num_ranks)}
    assert plan.epochs_per_rank == expected.get(plan.epochs_scaling, epochs)


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 64), st.integers(0, 50))
def test_batch_step_level_gives_every_rank_the_same_number_of_steps(
    samples, batch, num_ranks, limit
):
    make = {
        "num_ranks": num_ranks,
        "epochs": 2,
        "batch_size": batch,
        "learning_rate": 0.1,
        "num_samples": samples,
        "data_parallel": "batch_step",
        "max_steps": limit,
    }
    if samples < num_ranks:
        with pytest.raises(ParameterError, match="batch_step"):
            ScalingPlan.make(**make)
        return
    plan = ScalingPlan.make(**make)
    shards = [share_bounds(samples, rank, num_ranks) for rank in range(num_ranks)]
    smallest_shard = min(stop - start for start, stop in shards)
    assert plan.samples_per_epoch <= smallest_shard
    assert plan.steps_per_epoch == ceil(Fraction(plan.samples_per_epoch, batch))
    assert limit == 0 or plan.steps_per_epoch <= limit


def test_limiting_the_steps_limits_the_samples():
    plan = ScalingPlan.make(num_ranks=1, max_steps=2, **NT3)
    assert (plan.steps_per_epoch, plan.samples_per_epoch) == (2, 40)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 10),
        ({"max_steps": 4}, 4),
        ({"max_steps": 11}, 10),
        ({"num_ranks": 2}, 10),
        ({"num_ranks": 2, "data_parallel": "batch_step"}, 5),
        ({"batch_size": 109}, 1),
        ({"batch_size": 110}, None),
        ({"num_ranks": 12, "batch_scaling": "linear"}, None),
        ({"num_ranks": 11, "data_parallel": "batch_step"}, None),
    ],
)
def test_an_epoch_of_whole_batches_omits_the_rest(options, steps):
    options = NT3 | {"num_ranks": 1, "num_samples": 109, "batch_size": 10, **options}
    options |= {"epochs": options["num_ranks"], "whole_batches": True}
    if steps is None:
        with pytest.raises(ParameterError, match="batch_size"):
            ScalingPlan.make(**options)
        return
    plan = ScalingPlan.make(**options)
    assert (plan.steps_per_epoch, plan.samples_per_epoch) == (steps, steps * options["batch_size"])


def test_warmup_rises_linearly_to_the_scaled_learning_rate():
    plan = ScalingPlan.make(num_ranks=8, warmup_epochs=2, **NT3)
    rates = [warmup_learning_rate(plan, step) for step in range(3 * plan.steps_per_epoch)]
    assert rates[0] == pytest.approx(0.001)
    assert rates[56] == pytest.approx(0.0045)  # half way
    assert set(rates[112:]) == {0.008}
    assert rates == sorted(rates)
    assert plan.warnings == []


def test_a_warmup_that_raises_nothing_is_said():
    for num_ranks, warmup_from, is_said in ((1, None, True), (1, 1e-5, False), (2, None, False)):
        plan = ScalingPlan.make(
            **NT3 | {"num_ranks": num_ranks, "warmup_epochs": 1, "warmup_from": warmup_from}
        )
        assert bool(plan.warnings) is is_said


def test_a_warmup_longer_than_training_does_not_reach_the_scaled_rate():
    plan = ScalingPlan.make(num_ranks=96, warmup_epochs=5, **NT3)
    assert plan.epochs_per_rank == 4
    last = warmup_learning_rate(plan, 4 * plan.steps_per_epoch)
    assert last == pytest.approx(0.001 + 0.095 * 4 / 5)
    (warning,) = plan.warnings
    assert "5 epochs" in warning


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("epochs_scaling", "stong"),
        ("batch_scaling", "cube"),
        ("lr_scaling", "log"),
        ("data_parallel", "model"),
        ("num_samples", 0),
    ],
)
def test_invalid_options_are_named(option, value):
    with pytest.raises(ParameterError, match=option.removeprefix("num_")):
        ScalingPlan.make(**{"num_ranks": 1, **NT3, option: value})


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
    plan = ScalingPlan.make(
        num_ranks=saved_by,
        epochs=epochs * (saved_by if kind == "strong" else 1),
        batch_size=10,
        learning_rate=0.1,
        num_samples=samples,
        epochs_scaling=kind,
    )
    epoch = data.draw(st.integers(0, plan.epochs_per_rank))
    is_last = epoch == plan.epochs_per_rank
    step = data.draw(st.integers(0, 0 if is_last else plan.steps_per_epoch - 1))
    left = remaining_epochs(plan, ranks, epoch, step)
    done = epoch + Fraction(step, plan.steps_per_epoch)
    sharing = saved_by, ranks
    old, new = sharing if kind == "strong" else (1, 1)
    needed = old * (plan.epochs_per_rank - done)
    assert left * new >= needed > (left - 1) * new
    assert (left == 0) == is_last


@pytest.mark.parametrize(
    ("ranks", "position", "left"),
    [(1, (2, 0), 4), (4, (2, 0), 1), (3, (2, 0), 2), (1, (1, 28), 5), (4, (3, 55), 1)],
)
def test_epochs_left_after_a_checkpoint_of_two_ranks(ranks, position, left):
    plan = ScalingPlan.make(num_ranks=2, **NT3 | {"epochs": 8})
    assert plan.steps_per_epoch == 56
    assert remaining_epochs(plan, ranks, *position) == left
    made = ScalingPlan.make(
        num_ranks=ranks, epochs_per_rank=position[0] + left, **NT3 | {"epochs": 8}
    )
    assert (made.epochs_scaling, made.epochs_per_rank) == ("strong", position[0] + left)


def test_a_reduced_learning_rate_stays_reduced_at_another_number_of_ranks():
    saved, plan = (ScalingPlan.make(num_ranks=ranks, **NT3) for ranks in (2, 4))
    assert continued_learning_rate(saved.learning_rate, saved, plan) == plan.learning_rate
    reduced = continued_learning_rate(saved.learning_rate / 10, saved, plan)
    assert reduced == pytest.approx(plan.learning_rate / 10)
