"""Which ends of epochs are saved, and which checkpoints are kept."""

import json
import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.benchmark import find_benchmark
from candle_p1.checkpoints.policy import Best, SavePolicy, is_rising, keep_policy
from candle_p1.errors import ParameterError

NT3 = find_benchmark("nt3")


def policy_of(flags="", last_epoch=12):
    params = NT3.read_parameters(f"--ckpt_save_interval 1 {flags}".split())
    return SavePolicy.of(params, last_epoch)


@pytest.mark.parametrize(
    ("flags", "epochs", "best"),
    [
        ("--ckpt_save_best False", [1, 2, 3, 4, 5, 6, 7, 8], []),
        ("--ckpt_save_best False --ckpt_save_interval 3", [3, 6, 8], []),
        ("--ckpt_save_interval 100", [1, 2, 5, 8], [1, 2, 5]),
        ("--ckpt_save_interval 3 --ckpt_skip_epochs 4", [5, 6, 8], [5]),
        ("--ckpt_save_interval 3 --ckpt_skip_epochs 9", [], []),
        ("--ckpt_save_interval 0 --ckpt_every_s 60", [1, 2, 5, 8], [1, 2, 5]),
        ("--ckpt_save_interval 0 --ckpt_every_steps 60 --ckpt_save_best 0", [8], []),
    ],
)
def test_what_is_saved(flags, epochs, best):
    policy = policy_of(flags, last_epoch=8)
    losses = [0.9, 0.8, 0.8, math.nan, 0.1, 0.2, -math.inf, 0.1]
    ends = {i: policy.after_epoch(i, {"val_loss": loss}) for i, loss in enumerate(losses, 1)}
    assert [i for i in ends if ends[i].save] == epochs
    assert [i for i in ends if ends[i].best] == best


@given(st.lists(st.floats(), max_size=12), st.integers(0, 12))
def test_a_continued_run_saves_the_same_epochs(losses, restart):
    whole, policy = (policy_of("--ckpt_save_interval 5") for _ in range(2))
    for i, loss in enumerate(losses, 1):
        if i == restart:
            state = json.loads(json.dumps(policy.checkpoint_state()))
            policy = policy_of("--ckpt_save_interval 5")
            policy.restore_state(state)
        logs = {"val_loss": loss}
        assert policy.after_epoch(i, logs) == whole.after_epoch(i, logs)


def test_another_metric_begins_anew_after_a_restart():
    policy = policy_of()
    policy.after_epoch(1, {"val_loss": 0.1})
    other = policy_of("--ckpt_save_best_metric val_accuracy")
    other.restore_state(policy.checkpoint_state())
    assert other.after_epoch(2, {"val_accuracy": 0.5}).best
    without = policy_of("--ckpt_save_best False")
    without.restore_state(policy.checkpoint_state())
    policy.restore_state(without.checkpoint_state())
    assert not policy.after_epoch(2, {"val_loss": 0.2}).best


FALLING = (
    "loss val_loss val_mse val_xent val_dense_1_loss val_mae_2 lr mean_squared_error"
    " binary_crossentropy"
)
RISING = (
    "accuracy val_accuracy val_acc val_corr val_r2 val_auc_1 val_macro_f1"
    " top_k_categorical_accuracy"
)


@pytest.mark.parametrize(("names", "rises"), [(FALLING, False), (RISING, True)])
def test_the_direction_of_a_metric_is_known_by_its_name(names, rises):
    for name in names.split():
        best, key = Best(name), Best(name).metric
        improvements = [best.improves({key: value}) for value in (0.5, 0.4, 0.6)]
        assert improvements == [True, not rises, rises], name


@pytest.mark.extended
def test_every_metric_of_keras_with_a_direction_is_known():
    keras = pytest.importorskip("keras")
    known = []
    for kind in vars(keras.metrics).values():
        with suppress(TypeError):  # no class, or one that needs arguments
            metric = kind()
            if (direction := getattr(metric, "_direction", None)) is not None:
                assert is_rising(metric.name) is (direction == "up"), metric.name
                known.append(metric.name)
    assert len(known) > 20


def test_a_metric_without_a_direction_is_refused_before_anything_is_done():
    flags = "--ckpt_save_interval 1 --ckpt_save_best_metric val_speed"
    with pytest.raises(ParameterError, match=r"^ckpt_save_best_metric \(flag\): .*'val_speed'"):
        NT3.read_parameters(flags.split())
    assert NT3.read_parameters([*flags.split(), "--ckpt_save_best", "False"]).warnings == ()


def test_a_metric_that_a_run_does_not_have_is_refused_on_all_ranks():
    policy = policy_of("--ckpt_save_best_metric val_acuracy_loss")
    with pytest.raises(ParameterError, match=r"flag.* val_accuracy, val_loss") as refusal:
        policy.after_epoch(1, {"val_loss": 1.0, "val_accuracy": 0.5})
    assert refusal.value.agreed


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--ckpt_save_interval 1 --epochs 4 --ckpt_skip_epochs 4", []),
        ("--ckpt_save_interval 1 --epochs 4 --ckpt_skip_epochs 5", ["ckpt_skip_epochs"]),
        ("--ckpt_every_s 60 --ckpt_save_weights_only True", ["ckpt_save_weights_only"]),
    ],
)
def test_flags_that_lose_something_cause_a_warning(flags, named):
    warnings = NT3.read_parameters(flags.split()).warnings
    assert [each.partition(" (flag)")[0] for each in warnings] == named


def kept_after(num_saves, mode, limit):
    """Returns which of a run's checkpoints are left after so many saves."""
    keep, left = keep_policy(mode, limit), set()
    for number in range(1, num_saves + 1):
        left = keep(left | {number})
    return sorted(left)


@pytest.mark.parametrize(
    ("num_saves", "mode", "limit", "kept"),
    [
        (9, "linear", 3, [7, 8, 9]),
        (12, "linear", None, [11, 12]),
        (16, "exponential", None, [8, 12, 14, 15, 16]),
        (16, "exponential", 3, [14, 15, 16]),
    ],
)
def test_linear_keeps_the_newest_and_exponential_fewer_the_older_they_are(
    num_saves, mode, limit, kept
):
    assert kept_after(num_saves, mode, limit) == kept


@given(st.integers(1, 300))
def test_for_every_power_of_two_one_checkpoint_has_about_that_age(num_saves):
    ages = {num_saves - number for number in kept_after(num_saves, "exponential", None)}
    assert 0 in ages
    for k in range(num_saves.bit_length() - 1):
        assert any(2**k <= age < 2 ** (k + 1) for age in ages), (k, ages)
    assert len(ages) <= num_saves.bit_length() + 1
