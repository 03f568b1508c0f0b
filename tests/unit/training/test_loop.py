"""Training that goes on from each of its checkpoints, on one rank, with the backend of Keras."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.benchmark import DataSet, Samples, find_benchmark
from candle_p1.checkpoints.checkpoint import Checkpoint, CheckpointRoot
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.scaling import ScalingPlan
from candle_p1.training.restart import Restart

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
loop = pytest.importorskip("candle_p1.training.loop")

from candle_p1.instrument.logs import RunLog  # noqa: E402
from candle_p1.training.model_files import ModelFiles  # noqa: E402
from candle_p1.training.restart import SavedRun  # noqa: E402
from candle_p1.training.setup import Training  # noqa: E402
from tests.unit.training.conftest import NotingScreen  # noqa: E402

NT3 = find_benchmark("nt3")
COMM = SerialCommunicator()
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(18, 4)).astype("f4"), RANDOM.normal(size=(18, 1)).astype("f4")
DATA = DataSet(Samples(X, Y), Samples(X[:6] + 1, Y[:6]), Samples(X, Y))


class WaitingWriter(CheckpointWriter):
    """Lets training go on when a checkpoint is safe, so that none is left out."""

    def save(self, *arguments, **options):
        return super().save(*arguments, **options | {"wait": True})


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


PLAN = ScalingPlan.make(
    num_ranks=1, epochs=4, batch_size=4, learning_rate=0.1, num_samples=18, warmup_epochs=1,
    warmup_from=0.01,
)  # fmt: skip
FLAGS = (
    "--batch_size 4 --rng_seed 5 --patience 3 --ckpt_save_interval 1 --ckpt_save_best False"
    " --ckpt_every_steps 1 --ckpt_keep_limit 99 --early_stop True"
)


def made():
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    hidden = keras.layers.Dense(5), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
    model = keras.Sequential([keras.layers.Input((4,)), *hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def train(directory, checkpoint=None, after_epoch=None, *, flags="", watched=True):
    """Trains from the beginning or from a checkpoint; returns all that it has ended with."""
    directory.mkdir(exist_ok=True)
    params = NT3.read_parameters([*FLAGS.split(), *flags.split()])
    watchdog = SimpleNamespace(
        saving=nullcontext, count_steps=lambda num: None, save_requested=False
    )
    run = SimpleNamespace(
        comm=COMM,
        start=0.0,
        segment=2 if checkpoint else 1,
        directory=directory,
        checkpoint_root=directory / "ckpts",
        restart=checkpoint,
        watchdog=watchdog,
        screen=NotingScreen(),
        saved_run=lambda: SavedRun(directory="here", segment=1, steps=0),
        note=lambda **sections: None,
        note_epochs=lambda epochs: epochs.so_far(),
    )
    watch, monitored = Watch(), {"monitor": "val_loss", "min_delta": 10}
    callbacks = [
        *([watch] * watched),
        keras.callbacks.ReduceLROnPlateau(**monitored, factor=0.5, patience=1),
        keras.callbacks.EarlyStopping(**monitored, patience=3),
    ]
    benchmark = SimpleNamespace(callbacks=lambda params: callbacks, model_files=lambda params: [])
    model, restart = made(), Restart.of(checkpoint, COMM)
    if restart:
        restart.restore_arrays(model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(loop, "CheckpointWriter", WaitingWriter)
        trained = loop.train_model(
            Training(
                run=run,
                benchmark=benchmark,
                params=params,
                data=DATA,
                plan=PLAN,
                model=model,
                allreduces=None,
                log=RunLog(None, "nt3", None, 0.0),
                models=ModelFiles(benchmark, params, directory, run),
                fingerprint={"benchmark": "nt3", "parameters": {"early_stop": True}, "data": {}},
                restart=restart,
                after_epoch=after_epoch,
            )
        )
    trained.writer.close()
    root = CheckpointRoot(run.checkpoint_root)
    found = [Checkpoint(root.directory / name) for name in root.names()]
    return SimpleNamespace(
        end=(trained.end.epoch, trained.end.step),
        saved={(each.position.epoch, each.position.step): each for each in found},
        screen=run.screen,
        seen=watch.seen,
        weights=[w.tobytes() for w in model.get_weights()],
        optimizer=[np.asarray(v).tobytes() for v in model.optimizer.variables],
        history=(trained.history.epoch, trained.history.history),
        table=(directory / "history.csv").read_bytes(),
        epochs=[(each.metrics, each.steps.num) for each in trained.facts["epochs"]],
        stopped=trained.facts.get("stopped"),
        model_epoch=trained.facts["model_epoch"],
    )


def assert_same(one, two):
    names = ("history", "table", "weights", "optimizer", "epochs", "stopped", "model_epoch")
    for name in names:
        assert getattr(one, name) == getattr(two, name), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that was never interrupted, and saved before every step."""
    return train(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("position", [(1, 2), (4, 0)])
def test_training_goes_on_bit_for_bit(tmp_path, whole, position):
    assert whole.end == (4, 0)
    possible = [divmod(step, 5) for step in range(1, 21)]
    assert list(whole.saved) == possible
    assert len(set(whole.history[1]["learning_rate"])) > 2  # warm-up and plateau act
    assert whole.saved[4, 0].facts["stopped"]  # by early stopping, after the last epoch
    again = train(tmp_path, whole.saved[position])
    assert_same(again, whole)
    assert list(again.saved) == [each for each in possible if each > position]
    assert again.screen.epochs == list(range(position[0], 4))
    is_over = position == (4, 0)
    assert again.seen[:2] == ["begin", "end" if is_over else position[1]]
    assert again.seen[-1:] == ["end"]


def test_the_model_is_that_of_the_best_epoch(whole):
    """The end of each epoch is saved before the best one's weights return."""
    losses = whole.history[1]["val_loss"]
    best = losses.index(min(losses)) + 1
    assert whole.model_epoch == best < 4
    checkpoint = whole.saved[best, 0]
    names = [name for name in checkpoint.arrays if name.startswith("weights/")]
    assert sorted(checkpoint.read(name).tobytes() for name in names) == sorted(whole.weights)


@pytest.mark.parametrize(
    ("by", "position"), [("epoch", (0, 3)), ("step", (2, 2)), ("epoch", (3, 3))]
)
def test_blocks_of_steps_go_on_from_where_they_were_saved(tmp_path, by, position):
    """With JAX; no callback asks for single steps."""
    flags = {"flags": f"--ckpt_every_steps 3 --warmup_by {by}", "watched": False}
    unbroken = train(tmp_path / "unbroken", **flags)
    assert position in unbroken.saved
    again = train(tmp_path / "again", unbroken.saved[position], **flags)
    assert_same(again, unbroken)
    with_steps = train(tmp_path / "steps", flags=flags["flags"])
    assert_same(unbroken, with_steps)


def test_the_program_that_runs_sees_each_epoch_and_can_end_training(tmp_path, whole):
    seen = []

    def after_epoch(epoch, metrics):
        seen.append((epoch, metrics["val_loss"]))
        return epoch == 2

    ended = train(tmp_path, after_epoch=after_epoch)
    assert seen == list(enumerate(whole.history[1]["val_loss"][:2], start=1))
    assert (ended.end, len(ended.epochs)) == ((2, 0), 2)
    assert ended.stopped == "the program that called run() ended it"


def test_callbacks_see_every_step_and_the_lack_of_a_state_is_told(whole):
    assert [each for each in whole.seen if type(each) is int] == 4 * list(range(5))
    assert len(whole.seen) == 2 + 4 * (2 * 5 + 1)
    (warning,) = whole.screen.warned
    assert "callback Watch" in warning
