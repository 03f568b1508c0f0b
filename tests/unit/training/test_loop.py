"""Training that goes on from each of its checkpoints, on one rank, with the backend of Keras."""

from __future__ import annotations

import copy
import functools
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.benchmark import DataSet, Samples, find_benchmark
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.records.types import Position
from candle_p1.scaling import ScalingPlan

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
loop = pytest.importorskip("candle_p1.training.loop")

from candle_p1.instrument.mllog import RunLog  # noqa: E402
from candle_p1.training import state  # noqa: E402
from candle_p1.training.fingerprint import SavedRun, TrainingState  # noqa: E402
from candle_p1.training.model_files import ModelFiles  # noqa: E402
from candle_p1.training.setup import Training  # noqa: E402
from tests.unit.training.test_model_files import Screen  # noqa: E402

NT3 = find_benchmark("nt3")
COMM = SerialCommunicator()
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(18, 4)).astype("f4"), RANDOM.normal(size=(18, 1)).astype("f4")
DATA = DataSet(Samples(X, Y), Samples(X[:6] + 1, Y[:6]), Samples(X, Y))


class Memory:
    """Keeps checkpoints as a writer would write them."""

    def __init__(self):
        self.saved = {}

    def prepare(self, arrays):
        pass

    def abandon(self):
        pass

    def save(self, position, arrays, own, facts, *, best, wait):
        copies = {name: np.empty(each.shape, each.dtype) for name, each in arrays.items()}
        for name, each in arrays.items():
            each.copy_into(slice(0, each.shape[0] if each.shape else 1), copies[name])
        self.saved[position.epoch, position.step] = SimpleNamespace(
            arrays=copies, own=own, facts=json.loads(json.dumps(facts)), wait=wait
        )


class Reporter:
    """Tells of a signal once so many steps have begun."""

    def __init__(self, signal_at):
        self._signal_at, self._num_steps = signal_at, 0
        self.saving = nullcontext

    def count_step(self):
        self._num_steps += 1

    @property
    def save_requested(self):
        return 0 < self._signal_at <= self._num_steps


class TrainingScreen(Screen):
    def begin_training(self, num_epochs, num_steps, first_epoch):
        self.first_epoch, self.epochs = first_epoch, []

    def show_step(self, step):
        pass

    def show_epoch(self, epoch, metrics):
        self.epochs.append(epoch)

    def end_training(self):
        pass


class Restart:
    """A restart from what `Memory` holds."""

    def __init__(self, position, saved):
        self.state, self._saved = TrainingState.model_validate(saved.facts), saved
        self.start = Position(*position)
        self.is_over = self.state.stopped or position[0] == 4

    def restore_ranks(self, model, plan, seed):
        state.restore_replicated(model, self._saved.arrays.__getitem__, self._saved.arrays)
        state.restore_own(model, self._saved.own, within_epoch=False)
        return self._saved.own


class Watch(keras.callbacks.Callback):
    """Notes what it is told, as a benchmark's callback that keeps no state."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_begin(self, logs=None):
        self.seen.append("begin")

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        assert all(type(value) is float for value in logs.values())
        self.seen.append(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        assert list(logs) == ["loss", "mae", "learning_rate", "val_loss", "val_mae"]
        self.seen.append(logs["val_loss"])

    def on_train_end(self, logs=None):
        self.seen.append("end")


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
    hidden = keras.layers.Dense(5), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
    model = keras.Sequential([keras.layers.Input((4,)), *hidden, keras.layers.Dense(1)])
    settings = {"gradient_accumulation_steps": passes} if passes > 1 else {}
    if optimizer == "sgd":
        made_optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **settings)
    else:
        made_optimizer = keras.optimizers.Adam(0.1, **settings)
    model.compile(made_optimizer, "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def train(directory, optimizer, *, passes=1, restart=None, signal_at=0, every_steps=1):
    """Trains from the beginning or from what was saved; returns all that it has ended with."""
    flags = (
        f"--batch_size 4 --rng_seed 5 --patience 3 --ckpt_save_interval 1 --ckpt_save_best False"
        f" --ckpt_every_steps {every_steps} --backward_passes_per_step {passes}"
    )
    params = NT3.read_parameters(flags.split())
    run = SimpleNamespace(
        comm=COMM,
        start=0.0,
        segment=2 if restart else 1,
        directory=directory,
        checkpoint_root=directory,
        restart=restart,
        watchdog=Reporter(signal_at),
        screen=TrainingScreen(),
        saved_run=lambda: SavedRun(directory="here", segment=1, steps=0),
        note=lambda **sections: None,
        note_epochs=lambda epochs: epochs.so_far(),
    )
    watch, monitored = Watch(), {"monitor": "val_loss", "min_delta": 10}
    callbacks = [
        watch,
        keras.callbacks.ReduceLROnPlateau(**monitored, factor=0.5, patience=1),
        keras.callbacks.EarlyStopping(**monitored, patience=3),
    ]
    benchmark = SimpleNamespace(callbacks=lambda params: callbacks, model_files=lambda params: [])
    model = made(optimizer, passes)
    writer = Memory()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(loop, "CheckpointWriter", lambda *arguments, **options: writer)
        trained = loop.train_model(
            Training(
                run=run,
                benchmark=benchmark,
                params=params,
                data=DATA,
                plan=plan_for(passes),
                model=model,
                allreduces=None,
                log=RunLog(None, "nt3", None, 0.0),
                models=ModelFiles(benchmark, params, directory, run),
                fingerprint={"benchmark": "nt3", "parameters": {}, "data": {}},
                restart=restart,
            )
        )
    return SimpleNamespace(
        is_complete=not trained.is_interrupted,
        end=(trained.end.epoch, trained.end.step),
        saved=writer.saved,
        screen=run.screen,
        seen=watch.seen,
        weights=[w.tobytes() for w in model.get_weights()],
        optimizer=[np.asarray(v).tobytes() for v in model.optimizer.variables],
        history=(trained.history.epoch, trained.history.history),
        table=(directory / "history.csv").read_bytes(),
        epochs=trained.facts["epochs"],
        stopped=trained.facts.get("stopped"),
    )


def assert_same(one, two):
    assert one.history == two.history
    assert one.table == two.table
    assert one.weights == two.weights
    assert one.optimizer == two.optimizer
    assert [each.metrics for each in one.epochs] == [each.metrics for each in two.epochs]
    assert [each.steps.num for each in one.epochs] == [each.steps.num for each in two.epochs]
    assert one.stopped == two.stopped


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
    assert whole.end == (4, 0)
    num_steps = plan_for(passes).steps_per_epoch
    possible = [divmod(step, num_steps) for step in range(passes, 4 * num_steps + 1, passes)]
    assert list(whole.saved) == possible
    assert len(set(whole.history[1]["learning_rate"])) > 2  # warm-up and plateau act
    for step in steps:
        position = divmod(step, num_steps)
        restart = Restart(position, whole.saved[position])
        again = train(tmp_path, optimizer, passes=passes, restart=restart)
        assert_same(again, whole)
        assert list(again.saved) == [each for each in possible if each > position]
        assert again.screen.epochs == list(range(position[0], 4))
        if step < 4 * num_steps:
            assert again.seen[:2] == ["begin", position[1]]
            assert again.seen[-2:] == whole.seen[-2:]


def test_callbacks_see_every_step_and_the_lack_of_a_state_is_told(uninterrupted):
    whole = uninterrupted("sgd")
    assert [each for each in whole.seen if type(each) is int] == 4 * list(range(5))
    assert len(whole.seen) == 2 + 4 * (2 * 5 + 1)
    (warning,) = whole.screen.warned
    assert "callback Watch" in warning


@pytest.mark.extended
def test_a_run_that_stopped_early_does_not_go_on(tmp_path, uninterrupted):
    """Early stopping ends it after the fourth epoch; its last checkpoint says so."""
    whole = uninterrupted("sgd")
    last = whole.saved[4, 0]
    assert last.facts["stopped"]
    assert not whole.saved[3, 0].facts["stopped"]
    again = train(tmp_path, "sgd", restart=Restart((4, 0), last))
    assert again.history == whole.history
    assert (again.weights, again.optimizer) == (whole.weights, whole.optimizer)
    assert (again.saved, again.seen) == ({}, ["begin", "end"])


@pytest.mark.extended
@pytest.mark.parametrize(("passes", "signal_at"), [(1, 3), (1, 5), (2, 5)])
def test_a_signal_saves_and_ends(tmp_path, uninterrupted, passes, signal_at):
    ended = train(tmp_path, "adam", passes=passes, signal_at=signal_at, every_steps=0)
    assert not ended.is_complete
    position, saved = list(ended.saved.items())[-1]
    assert ended.end == position
    assert saved.wait
    again = train(tmp_path, "adam", passes=passes, restart=Restart(position, saved))
    assert_same(again, uninterrupted("adam", passes))


@pytest.mark.extended
@pytest.mark.parametrize("lost", ["own", "callbacks", "weights", "optimizer"])
def test_what_a_checkpoint_lacks_is_noticed(tmp_path, uninterrupted, lost):
    """The comparison above can fail."""
    whole = uninterrupted("adam")
    saved, fresh = copy.deepcopy(whole.saved[2, 2]), whole.saved[0, 1]
    if lost == "own":
        saved.own |= {name: each for name, each in fresh.own.items() if "epoch" not in name}
    elif lost == "callbacks":
        del saved.facts["callbacks"]["ReduceLROnPlateau-1"]
    else:
        saved.arrays |= {name: each for name, each in fresh.arrays.items() if name.startswith(lost)}
    again = train(tmp_path, "adam", restart=Restart((2, 2), saved))
    with pytest.raises(AssertionError):
        assert_same(again, whole)
