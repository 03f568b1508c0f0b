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

from candle_p1.training.epochs import EpochTimer, GatheredEpochs  # noqa: E402
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

    def best_is_lost(self):
        lost, self.loses = self.loses, False
        return lost


@pytest.fixture
def make_saver(monkeypatch):
    """Returns a saver for eight epochs of five steps, its model, and what notes what it saves."""
    monkeypatch.setattr(saver_module.state, "own_arrays", lambda model, within_epoch: {})
    comm, saved_run = SerialCommunicator(), SavedRun(directory="here", segment=1, steps=0)

    def make(flags="", start=(0, 0), is_signalled=False):
        model = SimpleNamespace(
            stop_training=False,
            optimizer=SimpleNamespace(learning_rate=keras.ops.convert_to_tensor(0.1)),
            metrics=[keras.metrics.Mean(name="loss")],
            non_trainable_weights=[],
            jax_state_sync=lambda: None,
        )
        watchdog = SimpleNamespace(save_requested=is_signalled)
        training = SimpleNamespace(
            run=SimpleNamespace(comm=comm, saved_run=lambda: saved_run, watchdog=watchdog),
            params=NT3.read_parameters(["--ckpt_save_best", "False", *flags.split()]),
            plan=SimpleNamespace(steps_per_epoch=5, epochs_per_rank=8, model_dump=dict),
            model=model,
            fingerprint={"benchmark": "nt3", "parameters": {}, "data": {}},
            restart=None,
            start=Position(*start),
        )
        timer = EpochTimer(0.0, lambda: (None, None))
        timer.begin_epoch()
        writer, epochs = Writer(), GatheredEpochs(comm, keras.callbacks.History(), 1)
        states = SimpleNamespace(capture=dict)
        return saver_module.Saver(training, writer, states, timer, epochs, dict), model, writer

    return make


def run_epoch(saver, epoch, *, first_step=0, **logs):
    for step in range(first_step, 5):
        assert saver.before_step(Position(epoch, step))
    assert saver.after_epoch(epoch, {"loss": 1.0, **logs})


@pytest.mark.parametrize(
    ("flags", "start", "saved"),
    [  # after a restart on other ranks, the steps before are no multiple of the passes
        ("1 --backward_passes_per_step 2", (3, 0), [(3, 2), (3, 4), (4, 1), (4, 3), (5, 0)]),
        ("4", (1, 3), [(2, 2)]),  # not (1, 3) again
    ],
)
def test_steps_count_from_the_start_of_a_segment(make_saver, flags, start, saved):
    saver, _, writer = make_saver(f"--ckpt_every_steps {flags}", start)
    assert saver.position == Position(*start)
    run_epoch(saver, start[0], first_step=start[1])
    run_epoch(saver, start[0] + 1)
    assert writer.saved == saved


@pytest.mark.parametrize("passes", [1, 2])
def test_blocks_of_steps_are_saved_where_single_steps_are(make_saver, passes):
    found = []
    for blocks in (True, False):
        flags = f"--ckpt_every_steps 3 --backward_passes_per_step {passes}"
        saver, _, writer = make_saver(flags)
        for epoch in range(4):
            step = 0
            while step < 5:
                assert saver.before_step(Position(epoch, step))
                step += min(saver.most_steps(), 5 - step) if blocks else 1
            assert saver.after_epoch(epoch, {"loss": 1.0})
        found.append(writer.saved)
    assert found[0] == found[1]
    assert len(found[0]) > 4


@pytest.mark.parametrize("allow_nan", [False, True])
def test_without_a_finite_loss_is_saved_only_what_is_allowed(make_saver, allow_nan):
    flags = f"--ckpt_save_interval 1 --ckpt_every_steps 5 --allow_nan {allow_nan}"
    saver, model, writer = make_saver(flags)
    run_epoch(saver, 0)
    model.stop_training = True
    run_epoch(saver, 1, loss=NAN)
    assert writer.saved == [(1, 0), (2, 0)][: 1 + allow_nan]
    assert writer.waited == [(2, 0)] * allow_nan
    assert saver.position == Position(2, 0)
    saver, model, writer = make_saver(f"--ckpt_every_steps 1 --allow_nan {allow_nan}")
    for step, loss in enumerate([1.0, 2.0, NAN, 1.0, 1.0]):
        saver.before_step(Position(0, step))
        model.metrics[0].update_state(loss)
    assert writer.saved == [(0, 1), (0, 2), (0, 3), (0, 4)][: 4 if allow_nan else 2]


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_signal_saves_and_ends_the_epoch(make_saver, is_finite):
    """If the loss is not finite, there is nothing to save, and no time for the rest of it."""
    saver, model, writer = make_saver(is_signalled=True)
    model.metrics[0].update_state(1.0 if is_finite else NAN)
    assert saver.before_step(Position(0, 1)) is not is_finite
    assert (saver.is_interrupted, model.stop_training) == (is_finite, not is_finite)
    assert writer.saved == writer.waited == [(0, 1)] * is_finite


def test_the_best_epoch_may_be_put_off_by_accumulation_or_lost(make_saver):
    saver, _, writer = make_saver("--ckpt_save_best True --backward_passes_per_step 12")
    for epoch, loss in enumerate([3.0, 4.0, 4.0]):
        run_epoch(saver, epoch, val_loss=loss)
    assert writer.saved == writer.best == [(2, 2)]
    saver, _, writer = make_saver("--ckpt_save_best True")
    for epoch, loss in enumerate([3.0, 1.0, 3.5, 2.0]):
        writer.loses = epoch == 2  # a worse one may then be the best
        run_epoch(saver, epoch, val_loss=loss)
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
            assert trigger.step() == (False, False)

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
        due = [trigger.agree()]
        clock.now_s += 10.0
        due += [trigger.agree(), trigger.agree()]  # until something is saved
        trigger.saved()
        return [is_due for is_due, _ in (*due, trigger.agree())]

    assert on_ranks(3, work, every_s=10.0) == 3 * [[False, True, True, False]]


def test_a_signal_to_one_rank_reaches_all():
    agreed = on_ranks(3, lambda trigger, clock, rank: trigger.agree(), signalled=2)
    assert agreed == 3 * [(False, True)]
