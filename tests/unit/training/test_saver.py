"""When a run saves its state; without training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from candle_p1.checkpoints.best import Best
from candle_p1.checkpoints.manifest import Position
from candle_p1.checkpoints.policy import SavePolicy
from candle_p1.distributed.comm import SerialCommunicator

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
saver_module = pytest.importorskip("candle_p1.training.saver")

from candle_p1.training.pulse import Agreed, Pulse  # noqa: E402

NAN = float("nan")


class Writer:
    """Notes what is saved."""

    def __init__(self):
        self.saved = []
        self.loses = False

    def save(self, position, arrays, mine, facts, *, best, wait):
        self.saved.append((position.epoch, position.step, best))
        return True

    def best_is_lost(self):
        lost, self.loses = self.loses, False
        return lost


@pytest.fixture
def writer():
    return Writer()


@pytest.fixture
def make_saver(monkeypatch, writer):
    """Returns a saver for epochs of five steps, and runs it through positions."""
    monkeypatch.setattr(saver_module, "own_arrays", lambda model, within_epoch: {})
    monkeypatch.setattr(saver_module, "replicated_arrays", lambda model, with_optimizer: {})
    monkeypatch.setattr(saver_module, "epoch_arrays", lambda epoch: {})

    def make(start=(0, 0), *, interval=0, best=None, **options):
        saver = saver_module.Saver(
            writer,
            SavePolicy(interval, 0, 8, best),
            Pulse(SerialCommunicator(), 0.0, lambda: False),
            SimpleNamespace(steps_per_epoch=5, epochs_per_rank=8, to_dict=dict),
            SimpleNamespace(capture=dict),
            SimpleNamespace(so_far=lambda: None),
            SimpleNamespace(to_facts=dict),
            dict,
            start=Position(*start),
            **options,
        )
        optimizer = SimpleNamespace(learning_rate=keras.ops.convert_to_tensor(0.1))
        loss = keras.metrics.Mean(name="loss")
        model = {"stop_training": False, "optimizer": optimizer, "metrics": [loss]}
        saver.set_model(SimpleNamespace(**model, non_trainable_weights=[]))
        return saver

    return make


def run_epoch(saver, epoch, *, first_step=0, **logs):
    saver.on_epoch_begin(epoch)
    for step in range(first_step, 5):
        saver.before_step(step)
    saver.on_epoch_end(epoch, {"loss": 1.0, **logs})


def positions(writer):
    return [(epoch, step) for epoch, step, _ in writer.saved]


def test_passes_count_from_the_start_of_a_part(make_saver, writer):
    """After a restart on other ranks, the steps before are no multiple of the passes."""
    saver = make_saver((3, 0), every_steps=1, passes=2)
    run_epoch(saver, 3)
    run_epoch(saver, 4)
    assert positions(writer) == [(3, 2), (3, 4), (4, 1), (4, 3), (5, 0)]


def test_the_position_of_the_restart_is_not_saved_again(make_saver, writer):
    saver = make_saver((1, 3), every_steps=4)
    run_epoch(saver, 1, first_step=3)
    assert positions(writer) == []
    run_epoch(saver, 2)
    assert positions(writer) == [(2, 2)]


def test_training_that_was_over_ends_where_it_began(make_saver):
    assert make_saver((4, 0)).position == Position(4, 0)


@pytest.mark.parametrize("allow_nan", [False, True])
def test_an_epoch_without_a_finite_loss_is_saved_only_if_that_is_allowed(
    make_saver, writer, allow_nan
):
    saver = make_saver(interval=1, every_steps=5, allow_nan=allow_nan)
    run_epoch(saver, 0)
    saver.model.stop_training = True
    run_epoch(saver, 1, loss=NAN)
    assert positions(writer) == [(1, 0), (2, 0)][: 1 + allow_nan]
    assert saver.position == Position(2, 0)


@pytest.mark.parametrize("allow_nan", [False, True])
def test_nothing_is_saved_within_an_epoch_once_its_loss_is_not_finite(
    make_saver, writer, allow_nan
):
    saver = make_saver(every_steps=1, allow_nan=allow_nan)
    saver.on_epoch_begin(0)
    for step, loss in enumerate([1.0, 2.0, NAN, 1.0, 1.0]):
        saver.before_step(step)
        saver.model.metrics[0].update_state(loss)
    assert positions(writer) == [(0, 1), (0, 2), (0, 3), (0, 4)][: 4 if allow_nan else 2]


def test_a_signal_ends_an_epoch_whose_loss_is_not_finite(make_saver, writer, monkeypatch):
    """There is nothing to save, and no time for the rest of the epoch."""
    saver = make_saver()
    monkeypatch.setattr(saver._pulse, "step", lambda: Agreed(is_due=False, is_signalled=True))
    saver.on_epoch_begin(0)
    saver.model.metrics[0].update_state(NAN)
    saver.before_step(1)
    assert saver.model.stop_training
    assert positions(writer) == []


def test_a_best_epoch_that_is_put_off_by_accumulation_is_saved_as_the_best(make_saver, writer):
    saver = make_saver(best=Best("val_loss"), passes=2)
    run_epoch(saver, 0, val_loss=3.0)
    run_epoch(saver, 1, val_loss=4.0)
    assert writer.saved == [(1, 1, True)]


def test_after_a_best_epoch_that_could_not_be_written_a_worse_one_may_be_the_best(
    make_saver, writer
):
    saver = make_saver(best=Best("val_loss"))
    run_epoch(saver, 0, val_loss=3.0)
    run_epoch(saver, 1, val_loss=1.0)
    writer.loses = True
    run_epoch(saver, 2, val_loss=3.5)
    run_epoch(saver, 3, val_loss=2.0)
    assert positions(writer) == [(1, 0), (2, 0), (4, 0)]
