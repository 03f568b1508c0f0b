"""Training that goes on from each of its checkpoints, on one rank, with the backend of Keras."""

from __future__ import annotations

import copy
import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.checkpoints.manifest import Position
from candle_p1.checkpoints.policy import SavePolicy
from candle_p1.data.samples import Samples
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.scaling import ScalingPlan

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
state = pytest.importorskip("candle_p1.training.state")

from candle_p1.data.batches import EvaluationBatches, TrainBatches  # noqa: E402
from candle_p1.distributed.callbacks import (  # noqa: E402
    EpochMetrics,
    LearningRateWarmup,
    SharedValidation,
)
from candle_p1.training.callback_state import CallbackStates  # noqa: E402
from candle_p1.training.callbacks import EpochTable, EpochTimer  # noqa: E402
from candle_p1.training.continued import TrainingCallbacks, fit_from  # noqa: E402
from candle_p1.training.epoch_facts import GatheredEpochs, epoch_from  # noqa: E402
from candle_p1.training.pulse import Pulse  # noqa: E402
from candle_p1.training.restart import Start  # noqa: E402
from candle_p1.training.saver import Saver  # noqa: E402

COMM = SerialCommunicator()
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(18, 4)).astype("f4"), RANDOM.normal(size=(18, 1)).astype("f4")
SAMPLES, HELD_OUT = Samples(X, Y), Samples(X[:6] + 1, Y[:6])


class Memory:
    """Keeps checkpoints as a writer would write them."""

    def __init__(self):
        self.saved = {}

    def save(self, position, arrays, mine, facts, *, best, wait):
        copies = {name: np.empty(each.shape, each.dtype) for name, each in arrays.items()}
        for name, each in arrays.items():
            each.copy_into(slice(0, each.shape[0] if each.shape else 1), copies[name])
        text = json.dumps(facts, allow_nan=False)
        self.saved[position] = SimpleNamespace(
            arrays=copies, mine=mine, facts=json.loads(text), best=best, wait=wait
        )


def plan_for(passes):
    return ScalingPlan.make(
        num_ranks=1,
        epochs=4,
        batch_size=4,
        learning_rate=0.1,
        num_samples=18,
        warmup_epochs=1,
        warmup_from=0.01,
        max_steps=4 if passes > 1 else 0,
    )


def made(optimizer, passes):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(5),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )
    settings = {"gradient_accumulation_steps": passes} if passes > 1 else {}
    made_optimizer = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[optimizer]
    if optimizer == "sgd":
        settings |= {"momentum": 0.9}
    model.compile(made_optimizer(0.1, **settings), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def train(directory, optimizer, *, passes=1, goes_on_from=None, signal_at=None, every_steps=1):
    """Trains from the beginning or from what was saved; returns all that it has ended with."""
    plan, model = plan_for(passes), made(optimizer, passes)
    batches = TrainBatches(SAMPLES, plan, seed=5, rank=0, shuffle=True)
    timer = EpochTimer(0.0, lambda: (0.0, 0.0))
    validation = SharedValidation(EvaluationBatches(HELD_OUT, 4, COMM), COMM)
    history = keras.callbacks.History()
    table = EpochTable(directory / "history.csv")
    signals = SimpleNamespace(number=0)

    def may_signal(batch, logs):
        signals.number += 1

    callbacks = [
        timer,
        keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: batches.set_epoch(epoch),
            on_train_batch_begin=may_signal,
        ),
        EpochMetrics(COMM),
        validation,
        LearningRateWarmup(plan),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10),
        keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=10),
        history,
        table,
    ]
    states, writer = CallbackStates(callbacks), Memory()
    saved, start = goes_on_from, Start()
    if saved:
        position, saved = saved
        start = Start(*position, is_over=saved.facts["stopped"] or position[0] == 4)
        state.restore_replicated(model, saved.arrays.__getitem__, saved.arrays)
        state.restore_own(model, saved.mine, within_epoch=False)
    if start.step:
        timer.resume(epoch_from(saved.mine))
        state.build_metrics(model, batches[0])
    epochs = GatheredEpochs(
        COMM, timer, validation, history, 18, 2 if saved else 1, saved and saved.facts
    )
    saver = Saver(
        writer,
        SavePolicy(interval=1, skip_epochs=0, last_epoch=4),
        Pulse(COMM, 0.0, lambda: 0 < (signal_at or 0) <= signals.number),
        plan,
        states,
        timer,
        epochs,
        lambda: {"run": "this"},
        start=Position(start.epoch, start.step),
        every_steps=every_steps,
        passes=passes,
    )

    def begin():
        states.begin()
        if saved:
            states.restore(saved.facts["callbacks"])

    together = TrainingCallbacks(
        [*callbacks, saver],
        model,
        4,
        plan.steps_per_epoch,
        begun=begin,
        resumed=lambda: state.restore_own(model, saved.mine, within_epoch=True),
        before_step=saver.before_step,
    )
    is_complete = fit_from(model, batches, together, start, 4)
    epochs.gather()
    return SimpleNamespace(
        is_complete=is_complete,
        saved=writer.saved,
        weights=[w.tobytes() for w in model.get_weights()],
        optimizer=[np.asarray(v).tobytes() for v in model.optimizer.variables],
        history=(history.epoch, history.history),
        table=(directory / "history.csv").read_bytes(),
        epochs=epochs.facts,
        num_samples=epochs.num_samples,
    )


def assert_same(one, two):
    assert one.history == two.history
    assert one.table == two.table
    assert one.weights == two.weights
    assert one.optimizer == two.optimizer
    assert [each.metrics for each in one.epochs] == [each.metrics for each in two.epochs]
    assert [each.steps.num for each in one.epochs] == [each.steps.num for each in two.epochs]
    assert one.num_samples == two.num_samples


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Returns a training that was never interrupted, and saved whenever it could."""

    @functools.cache
    def trained(optimizer, passes=1):
        return train(tmp_path_factory.mktemp("whole"), optimizer, passes=passes)

    return trained


extended = functools.partial(pytest.param, marks=pytest.mark.extended)


@pytest.mark.parametrize(
    ("optimizer", "passes", "steps"),
    [
        ("sgd", 1, [7]),
        extended("sgd", 1, [2, 5, 19, 20]),
        extended("adam", 1, [8]),
        extended("adam", 2, [2, 6, 8]),
    ],
)
def test_training_goes_on_bit_for_bit(tmp_path, uninterrupted, optimizer, passes, steps):
    whole = uninterrupted(optimizer, passes)
    assert whole.is_complete
    num_steps = plan_for(passes).steps_per_epoch
    possible = [divmod(step, num_steps) for step in range(passes, 4 * num_steps + 1, passes)]
    assert [(each.epoch, each.step) for each in whole.saved] == possible
    assert len(set(whole.history[1]["learning_rate"])) > 2  # warm-up and plateau act
    for step in steps:
        position = divmod(step, num_steps)
        given = (position, whole.saved[Position(*position)])
        again = train(tmp_path, optimizer, passes=passes, goes_on_from=given)
        assert_same(again, whole)
        assert [(each.epoch, each.step) for each in again.saved] == [
            each for each in possible if each > position
        ]


@pytest.mark.extended
def test_a_run_that_stopped_early_does_not_go_on(tmp_path, uninterrupted):
    """Early stopping ends it after the fourth epoch; its last checkpoint says so."""
    whole = uninterrupted("sgd")
    last = whole.saved[Position(4, 0)]
    assert last.facts["stopped"]
    assert not whole.saved[Position(3, 0)].facts["stopped"]
    again = train(tmp_path, "sgd", goes_on_from=((4, 0), last))
    assert_same(again, whole)
    assert again.saved == {}


@pytest.mark.extended
@pytest.mark.parametrize(("passes", "signal_at"), [(1, 3), (1, 5), (2, 5)])
def test_a_signal_saves_and_ends(tmp_path, uninterrupted, passes, signal_at):
    ended = train(tmp_path, "adam", passes=passes, signal_at=signal_at, every_steps=0)
    assert not ended.is_complete
    position, saved = max(ended.saved.items())
    assert saved.wait
    given = ((position.epoch, position.step), saved)
    again = train(tmp_path, "adam", passes=passes, goes_on_from=given)
    assert_same(again, uninterrupted("adam", passes))


@pytest.mark.extended
@pytest.mark.parametrize("lost", ["mine", "callbacks", "weights", "optimizer"])
def test_what_a_checkpoint_lacks_is_noticed(tmp_path, uninterrupted, lost):
    """The comparison above can fail."""
    whole = uninterrupted("adam")
    saved = copy.deepcopy(whole.saved[Position(2, 2)])
    fresh = whole.saved[Position(0, 1)]
    if lost == "mine":
        saved.mine |= {name: each for name, each in fresh.mine.items() if "epoch" not in name}
    elif lost == "callbacks":
        del saved.facts["callbacks"]["ReduceLROnPlateau-1"]
    else:
        saved.arrays |= {name: each for name, each in fresh.arrays.items() if name.startswith(lost)}
    again = train(tmp_path, "adam", goes_on_from=((2, 2), saved))
    with pytest.raises(AssertionError):
        assert_same(again, whole)
