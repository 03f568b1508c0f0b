"""Which ends of epochs are saved, and which checkpoints are kept."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.benchmark import find_benchmark
from candle_p1.checkpoints.best import Best, check_metric, is_rising
from candle_p1.checkpoints.policy import SavePolicy, are_saved, keep_policy
from candle_p1.errors import ParameterError

NT3 = find_benchmark("nt3")


def policy_of(*flags, last_epoch=12):
    return SavePolicy.of(NT3.read_parameters(["--ckpt_save_interval", "1", *flags]), last_epoch)


def saved(policy, losses):
    """Returns the epochs that a policy saves, and those that it calls the best so far."""
    ends = {i: policy.after_epoch(i, {"val_loss": loss}) for i, loss in enumerate(losses, start=1)}
    return [i for i in ends if ends[i].save], [i for i in ends if ends[i].best]


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
    losses = [0.9, 0.8, 0.8, math.nan, 0.1, 0.2, math.inf, 0.1]
    assert saved(policy_of(*flags.split(), last_epoch=8), losses) == (epochs, best)


@given(
    st.lists(st.floats(), min_size=1, max_size=20),
    st.integers(0, 6),
    st.integers(0, 6),
    st.booleans(),
)
def test_the_rules_hold_for_any_losses(losses, interval, skip, save_best):
    best = Best("val_loss") if save_best else None
    epochs, of_best = saved(SavePolicy(interval, skip, len(losses), best), losses)
    allowed = [i for i in range(1, len(losses) + 1) if i >= skip]
    expected = [
        i
        for i in allowed
        if math.isfinite(losses[i - 1])
        and all(
            losses[i - 1] < losses[j - 1] for j in allowed if j < i and math.isfinite(losses[j - 1])
        )
    ]
    assert of_best == (expected if save_best else [])
    due = {i for i in allowed if interval and i % interval == 0} | ({len(losses)} & set(allowed))
    assert set(epochs) == due | set(of_best)


@given(st.lists(st.floats(), max_size=12), st.integers(0, 12))
def test_a_continued_run_saves_the_same_epochs(losses, restart):
    whole = policy_of("--ckpt_save_interval", "5")
    expected = [whole.after_epoch(i, {"val_loss": loss}) for i, loss in enumerate(losses, 1)]
    found, policy = [], policy_of("--ckpt_save_interval", "5")
    for i, loss in enumerate(losses, 1):
        if i == restart:
            state = json.loads(json.dumps(policy.checkpoint_state()))
            policy = policy_of("--ckpt_save_interval", "5")
            policy.restore_state(state)
        found.append(policy.after_epoch(i, {"val_loss": loss}))
    assert found == expected


def test_another_metric_begins_anew_after_a_restart():
    policy = policy_of()
    policy.after_epoch(1, {"val_loss": 0.1})
    other = policy_of("--ckpt_save_best_metric", "val_accuracy")
    other.restore_state(policy.checkpoint_state())
    assert other.after_epoch(2, {"val_accuracy": 0.5}).best
    without = policy_of("--ckpt_save_best", "False")
    without.restore_state(policy.checkpoint_state())
    policy.restore_state(without.checkpoint_state())
    assert not policy.after_epoch(2, {"val_loss": 0.2}).best


@pytest.mark.parametrize(
    ("name", "rises"),
    [
        *((f"val_{name}", False) for name in ("loss", "mse", "xent", "dense_1_loss", "mae_2")),
        *((f"val_{name}", True) for name in ("accuracy", "acc", "corr", "r2", "auc_1", "macro_f1")),
        *(("lr", False), ("loss", False), ("accuracy", True), ("mean_squared_error", False)),
        *(("binary_crossentropy", False), ("top_k_categorical_accuracy", True)),
    ],
)
def test_the_direction_of_a_metric_is_known_by_its_name(name, rises):
    assert is_rising(name) is rises
    best, key = Best(name), Best(name).metric
    improvements = [best.improves({key: value}) for value in (0.5, 0.4, 0.6)]
    assert improvements == [True, not rises, rises]


@pytest.mark.extended
def test_every_metric_of_keras_with_a_direction_is_known():
    keras = pytest.importorskip("keras")
    known = {
        name: kind
        for name, kind in vars(keras.metrics).items()
        if isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)
    }
    arguments = {
        "MeanIoU": {"num_classes": 2},
        "OneHotMeanIoU": {"num_classes": 2},
        "IoU": {"num_classes": 2, "target_class_ids": [0]},
        "OneHotIoU": {"num_classes": 2, "target_class_ids": [0]},
        "PrecisionAtRecall": {"recall": 0.5},
        "RecallAtPrecision": {"precision": 0.5},
        "SensitivityAtSpecificity": {"specificity": 0.5},
        "SpecificityAtSensitivity": {"sensitivity": 0.5},
    }
    unknown = {"Metric", "Mean", "Sum", "MeanMetricWrapper"}  # of whatever they are given
    for name in known.keys() - unknown:
        metric = known[name](**arguments.get(name, {}))
        direction = getattr(metric, "_direction", None)
        if direction is not None:
            assert is_rising(metric.name) is (direction == "up"), name


def test_a_metric_without_a_direction_is_refused_before_anything_is_done():
    flags = "--ckpt_save_interval 1 --ckpt_save_best_metric val_speed"
    with pytest.raises(ParameterError, match=r"^ckpt_save_best_metric \(flag\): .*'val_speed'"):
        NT3.read_parameters(flags.split())
    assert NT3.read_parameters([*flags.split(), "--ckpt_save_best", "False"]).warnings == ()


def test_a_metric_that_a_run_does_not_have_is_refused():
    policy = policy_of("--ckpt_save_best_metric", "val_acuracy_loss")
    with pytest.raises(ParameterError, match=r"flag.* val_accuracy, val_loss") as refusal:
        policy.after_epoch(1, {"val_loss": 1.0, "val_accuracy": 0.5})
    assert refusal.value.agreed
    check_metric("val_acc", ["val_accuracy"], "metric")


def test_what_means_nothing_without_checkpoints_is_said():
    flags = ["--ckpt_keep_limit", "3", "--ckpt_required", "True", "--ckpt_checksum", "True"]
    params = NT3.read_parameters(flags)
    assert not are_saved(params)
    names = {sentence.partition(" ")[0] for sentence in params.idle(1)}
    assert names == {"ckpt_keep_limit", "ckpt_required"}
    for interval in ("--ckpt_save_interval=1", "--ckpt_every_s=0.5", "--ckpt_every_steps=9"):
        params = NT3.read_parameters([*flags, interval])
        assert are_saved(params)
        assert params.idle(1) == []


def test_skipping_all_epochs_causes_a_warning():
    flags = ["--epochs", "4", "--ckpt_save_interval", "1", "--ckpt_skip_epochs"]
    assert NT3.read_parameters([*flags, "4"]).warnings == ()
    (warning,) = NT3.read_parameters([*flags, "5"]).warnings
    assert "ckpt_skip_epochs (flag)" in warning


def test_leaving_out_the_optimizer_causes_a_warning():
    params = NT3.read_parameters(["--ckpt_every_s", "60", "--ckpt_save_weights_only", "True"])
    (warning,) = params.warnings
    assert "ckpt_save_weights_only (flag)" in warning


def kept_after(num_saves, mode, limit):
    """Returns which of a run's checkpoints are left after so many saves."""
    keep, left = keep_policy(mode, limit), set()
    for number in range(1, num_saves + 1):
        left = keep(left | {number})
    return sorted(left)


@pytest.mark.parametrize(
    ("num_saves", "mode", "limit", "kept"),
    [
        (0, "linear", 2, []),
        (0, "exponential", None, []),
        (4, "linear", 10**6, [1, 2, 3, 4]),
        (9, "linear", 3, [7, 8, 9]),
        (12, "linear", None, [11, 12]),
        (16, "exponential", None, [8, 12, 14, 15, 16]),
        (13, "exponential", 10**6, [8, 10, 12, 13]),
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
