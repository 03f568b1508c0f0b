"""When a run saves its state, and when its ranks agree on that; without training."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.benchmark import find_benchmark
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.records.types import Position
from tools.simulated import SimulatedJob

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
saver_module = pytest.importorskip("candle_p1.training.saver")

from candle_p1.training.restart import SavedRun  # noqa: E402

NAN = float("nan")
NT3 = find_benchmark("nt3")


class Writer:
    """Notes what is saved."""

    def __init__(self):
        self.saved, self.best, self.waited, self.loses = [], [], [], False

    def save(self, position, arrays, own, facts, *, best, wait):
        at = position.epoch, position.step
        self.saved.append(at)
        self.best += [at] * best
        self.waited += [at] * wait
        return True

    def best_is_lost(self):
        lost, self.loses = self.loses, False
        return lost


@pytest.fixture
def writer():
    return Writer()


@pytest.fixture
def make_saver(monkeypatch, writer):
    """Returns a saver for eight epochs of five steps, and its model."""
    monkeypatch.setattr(saver_module, "own_arrays", lambda model, within_epoch: {})
    monkeypatch.setattr(saver_module, "epoch_arrays", lambda epoch: {})
    comm, saved_run = SerialCommunicator(), SavedRun(directory="here", segment=1, steps=0)

    def make(flags="--ckpt_save_best False", start=(0, 0), is_signalled=False):
        watchdog = SimpleNamespace(save_requested=is_signalled)
        model = SimpleNamespace(
            stop_training=False,
            optimizer=SimpleNamespace(learning_rate=keras.ops.convert_to_tensor(0.1)),
            metrics=[keras.metrics.Mean(name="loss")],
            non_trainable_weights=[],
            jax_state_sync=lambda: None,
        )
        training = SimpleNamespace(
            run=SimpleNamespace(comm=comm, saved_run=lambda: saved_run, watchdog=watchdog),
            params=NT3.read_parameters(flags.split()),
            plan=SimpleNamespace(steps_per_epoch=5, epochs_per_rank=8, model_dump=dict),
            model=model,
            fingerprint={"benchmark": "nt3", "parameters": {}, "data": {}},
            restart=None,
            start=Position(*start),
        )
        saver = saver_module.Saver(
            training,
            writer,
            SimpleNamespace(capture=dict),
            SimpleNamespace(so_far=lambda: None),
            SimpleNamespace(to_facts=lambda: {"epochs": [], "num_samples": 0}),
            dict,
        )
        return saver, model

    return make


def run_epoch(saver, epoch, *, first_step=0, **logs):
    for step in range(first_step, 5):
        assert saver.before_step(Position(epoch, step))
    assert saver.after_epoch(epoch, {"loss": 1.0, **logs})


def test_passes_count_from_the_start_of_a_part(make_saver, writer):
    """After a restart on other ranks, the steps before are no multiple of the passes."""
    flags = "--ckpt_save_best False --ckpt_every_steps 1 --backward_passes_per_step 2"
    saver, _ = make_saver(flags, start=(3, 0))
    run_epoch(saver, 3)
    run_epoch(saver, 4)
    assert writer.saved == [(3, 2), (3, 4), (4, 1), (4, 3), (5, 0)]


@pytest.mark.parametrize("passes", [1, 2])
def test_blocks_of_steps_are_saved_where_single_steps_are(make_saver, writer, passes):
    flags = f"--ckpt_save_best False --ckpt_every_steps 3 --backward_passes_per_step {passes}"
    saver, _ = make_saver(flags)
    for epoch in range(4):
        step = 0
        while step < 5:
            assert saver.before_step(Position(epoch, step))
            step += min(saver.most_steps(), 5 - step)
        assert saver.after_epoch(epoch, {"loss": 1.0})
    blocks, writer.saved[:] = list(writer.saved), []
    saver, _ = make_saver(flags)
    for epoch in range(4):
        run_epoch(saver, epoch)
    assert blocks == writer.saved
    assert len(blocks) > 4


def test_the_position_of_the_restart_is_not_saved_again(make_saver, writer):
    saver, _ = make_saver("--ckpt_save_best False --ckpt_every_steps 4", start=(1, 3))
    assert saver.position == Position(1, 3)
    run_epoch(saver, 1, first_step=3)
    assert writer.saved == []
    run_epoch(saver, 2)
    assert writer.saved == [(2, 2)]


@pytest.mark.parametrize("allow_nan", [False, True])
def test_an_epoch_without_a_finite_loss_is_saved_only_if_that_is_allowed(
    make_saver, writer, allow_nan
):
    flags = "--ckpt_save_best False --ckpt_save_interval 1 --ckpt_every_steps 5"
    saver, model = make_saver(f"{flags} --allow_nan {allow_nan}")
    run_epoch(saver, 0)
    model.stop_training = True
    run_epoch(saver, 1, loss=NAN)
    assert writer.saved == [(1, 0), (2, 0)][: 1 + allow_nan]
    assert writer.waited == [(2, 0)] * allow_nan
    assert saver.position == Position(2, 0)


@pytest.mark.parametrize(("allow_nan", "num_saved"), [(False, 2), (True, 4)])
def test_once_its_loss_is_not_finite_an_epoch_is_not_saved(
    make_saver, writer, allow_nan, num_saved
):
    saver, model = make_saver(f"--ckpt_every_steps 1 --allow_nan {allow_nan}")
    for step, loss in enumerate([1.0, 2.0, NAN, 1.0, 1.0]):
        saver.before_step(Position(0, step))
        model.metrics[0].update_state(loss)
    assert writer.saved == [(0, 1), (0, 2), (0, 3), (0, 4)][:num_saved]


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_signal_saves_and_ends_the_epoch(make_saver, writer, is_finite):
    """If the loss is not finite, there is nothing to save, and no time for the rest of it."""
    saver, model = make_saver(is_signalled=True)
    model.metrics[0].update_state(1.0 if is_finite else NAN)
    assert saver.before_step(Position(0, 1)) is not is_finite
    assert saver.is_interrupted is is_finite
    assert model.stop_training is not is_finite
    assert writer.saved == writer.waited == [(0, 1)] * is_finite


def test_a_best_epoch_that_is_put_off_by_accumulation_is_saved_as_the_best(make_saver, writer):
    saver, _ = make_saver("--backward_passes_per_step 12")
    for epoch, loss in enumerate([3.0, 4.0, 4.0]):
        run_epoch(saver, epoch, val_loss=loss)
    assert writer.saved == writer.best == [(2, 2)]


def test_after_a_best_epoch_that_could_not_be_written_a_worse_one_may_be_the_best(
    make_saver, writer
):
    saver, _ = make_saver("")
    run_epoch(saver, 0, val_loss=3.0)
    run_epoch(saver, 1, val_loss=1.0)
    writer.loses = True
    run_epoch(saver, 2, val_loss=3.5)
    run_epoch(saver, 3, val_loss=2.0)
    assert writer.saved == [(1, 0), (2, 0), (4, 0)]


class Clock:
    """A rank's own."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


def on_ranks(num_ranks, work, *, every_s=0.0, signalled=None):
    """Runs `work` with the trigger and the clock of each rank; fails if one waits in vain."""

    def on_rank(comm):
        clock = Clock()
        trigger = saver_module.SaveTrigger(comm, every_s, lambda: comm.rank == signalled, clock)
        return work(trigger, clock, comm.rank)

    return SimulatedJob(num_ranks).run(on_rank)


@given(st.integers(1, 4), st.lists(st.sampled_from([0.001, 0.02, 0.3, 5.0]), max_size=60))
def test_all_ranks_agree_at_the_same_steps(num_ranks, seconds):
    def work(trigger, clock, rank):
        for took_s in seconds:
            clock.now_s += took_s * (1 + 0.1 * rank)
            assert trigger.step() == saver_module.Agreed(False, False)

    on_ranks(num_ranks, work)


@pytest.mark.parametrize("step_s", [0.01, 0.1, 3.0])
def test_ranks_agree_about_once_a_second(step_s, monkeypatch):
    rounds, comm, clock = [], SerialCommunicator(), Clock()
    monkeypatch.setattr(comm, "allreduce_sum", lambda array: rounds.append(array) or array)
    trigger = saver_module.SaveTrigger(comm, 0.0, lambda: False, clock)
    for _ in range(round(60 / step_s)):
        clock.now_s += step_s
        trigger.step()
    expected = 60 / max(step_s, 1.0)
    assert expected <= len(rounds) <= expected + 5


def test_rank_0_decides_by_its_clock():
    def work(trigger, clock, rank):
        clock.now_s = 100.0 * (rank > 0)
        due = [trigger.agree().is_due]
        clock.now_s += 10.0
        due += [trigger.agree().is_due, trigger.agree().is_due]  # until something is saved
        trigger.saved()
        return [*due, trigger.agree().is_due]

    assert on_ranks(3, work, every_s=10.0) == 3 * [[False, True, True, False]]


def test_a_signal_to_one_rank_reaches_all():
    agreed = on_ranks(3, lambda trigger, clock, rank: trigger.agree(), signalled=2)
    assert agreed == 3 * [saver_module.Agreed(False, True)]
