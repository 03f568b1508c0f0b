"""What a restart refuses, and what it leaves to train; without a framework."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.checkpoints.manifest import Position
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import CheckpointError
from candle_p1.scaling import ScalingPlan
from candle_p1.training.identity import check_arrays, describe_identity
from candle_p1.training.restart import Restart, Start, may_restart

NT3 = find_benchmark("nt3")
HERE = Path("ckpts/epoch-0002-step-000003")


class Ranks(SerialCommunicator):
    def __init__(self, size):
        self.size = size


def params(*flags):
    return NT3.read_parameters(list(flags))


def plan(num_ranks, epochs_per_rank=None):
    return ScalingPlan.make(
        num_ranks=num_ranks,
        epochs=8,
        batch_size=10,
        learning_rate=0.1,
        num_samples=100,
        epochs_per_rank=epochs_per_rank,
    )


def restart(num_ranks=2, position=(2, 3), saved_by=2, **facts):
    known = {
        "plan": plan(saved_by).to_dict(),
        "identity": describe_identity("nt3", params()),
        "data": {"train": "ab", "test": {"x.csv": 7}},
        "stopped": False,
    }
    checkpoint = SimpleNamespace(directory=HERE, position=Position(*position), facts=known | facts)
    return Restart.of(checkpoint, Ranks(num_ranks))


def test_without_a_checkpoint_there_is_none():
    assert Restart.of(None, Ranks(1)) is None


@pytest.mark.parametrize(
    ("num_ranks", "position", "start", "epochs"),
    [
        (2, (2, 3), Start(2, 3), 4),
        (2, (3, 0), Start(3, 0), 4),
        (2, (4, 0), Start(4, 0, is_over=True), 4),
        (1, (2, 3), Start(2, 0), 6),
        (4, (2, 3), Start(2, 0), 3),
        (4, (4, 0), Start(4, 0, is_over=True), 4),
    ],
)
def test_other_ranks_begin_an_incomplete_epoch_anew(num_ranks, position, start, epochs):
    found = restart(num_ranks, position)
    assert (found.start, found.epochs_per_rank) == (start, epochs)


def test_training_that_stopped_does_not_go_on():
    assert restart(stopped=True).start.is_over


def test_the_same_run_is_accepted():
    found = restart()
    found.check_run(describe_identity("nt3", params("--ckpt_every_s", "9", "--loader", "cached")))
    found.check_run(describe_identity("nt3", params("--timeout", "60", "--eval_bool", "False")))
    found.check_plan(plan(2))
    found.check_data({"train": "ab", "test": {"x.csv": 7}})


def refused(check, *args):
    with pytest.raises(CheckpointError) as caught:
        check(*args)
    message = str(caught.value)
    assert str(HERE) in message
    assert "--ckpt_restart_mode off" in message
    return message


def test_differences_are_named():
    found = restart()
    other = describe_identity("nt3", params("--batch_size", "7", "--rng_seed", "1"))
    message = refused(found.check_run, other)
    assert "batch_size is 20 there and 7 here; rng_seed is 7102 there and 1 here" in message
    of_p1b1 = describe_identity("p1b1", params())
    assert "it is of nt3, and this run of p1b1" in refused(found.check_run, of_p1b1)
    message = refused(found.check_data, {"train": "ab", "test": {"x.csv": 8}})
    assert "the data of the role test" in message
    message = refused(found.check_plan, plan(2, epochs_per_rank=5))
    assert "epochs_per_rank of the plan is 4 there and 5 here" in message
    message = refused(check_arrays, HERE, [f"it has no weights/{i}" for i in range(8)])
    assert message.count("its model is another") == 5
    assert "and 3 more" in message


def test_another_number_of_ranks_has_another_plan():
    restart(num_ranks=4).check_plan(plan(4))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_files_are_released_when_all_is_restored(num_ranks):
    pytest.importorskip("keras")
    found = restart(num_ranks, saved_by=1, learning_rate=0.1, weights_only=False)
    model = SimpleNamespace(variables=[], optimizer=SimpleNamespace(learning_rate=0.0))
    done = []
    found._checkpoint.rank_state = lambda rank: done.append("read") or {}
    found._checkpoint.release = lambda: done.append("released")
    found.restore_ranks(model, plan(num_ranks), seed=1)
    assert done[-1] == "released"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], False),
        (["--ckpt_every_s", "1"], True),
        (["--ckpt_save_interval", "1", "--ckpt_restart_mode", "off"], False),
    ],
)
def test_only_runs_with_checkpoints_restart(flags, expected):
    assert may_restart(params(*flags)) is expected
