"""What a restart refuses, and what it leaves to train; without training."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.checkpoints.shards import ArraySpec
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import CheckpointError
from candle_p1.records.types import Position
from candle_p1.scaling import ScalingPlan
from candle_p1.training.restart import Restart, check_equal, run_fingerprint

NT3 = find_benchmark("nt3")
HERE = Path("ckpts/epoch-0002-step-000003")
DATA = {"train": "ab", "test": {"x.csv": 7}}


class Ranks(SerialCommunicator):
    def __init__(self, size):
        self.size = size


def params(flags=""):
    return NT3.read_parameters(flags.split())


def plan(num_ranks, epochs_per_rank=None):
    return ScalingPlan.make(
        num_ranks=num_ranks, epochs=8, batch_size=10, learning_rate=0.1, num_samples=100,
        epochs_per_rank=epochs_per_rank,
    )  # fmt: skip


def restart(num_ranks=2, position=(2, 3), arrays=("weights/dense/kernel",), **facts):
    known = run_fingerprint("nt3", params()) | {
        "plan": plan(2).model_dump(),
        "data": DATA,
        "run": {"directory": "out", "segment": 1, "steps": 5},
        **{"weights_only": False, "learning_rate": 0.1, "stopped": False, "policy": {}},
        **{"callbacks": {}, "epochs": [], "num_samples": 0},
    }
    of_training = {"arrays": dict.fromkeys(arrays), "facts": known | facts}
    checkpoint = SimpleNamespace(directory=HERE, position=Position(*position), **of_training)
    return Restart.of(checkpoint, Ranks(num_ranks))


@pytest.mark.parametrize(
    ("num_ranks", "position", "start", "epochs", "is_over"),
    [
        (2, (2, 3), (2, 3), 4, False),
        (2, (4, 0), (4, 0), 4, True),
        (1, (2, 3), (2, 0), 6, False),
        (4, (2, 3), (2, 0), 3, False),
        (4, (4, 0), (4, 0), 4, True),
    ],
)
def test_other_ranks_begin_an_incomplete_epoch_anew(num_ranks, position, start, epochs, is_over):
    found = restart(num_ranks, position)
    assert (found.start, found.epochs_per_rank) == (Position(*start), epochs)
    assert found.is_over is is_over


def test_a_checkpoint_says_whether_training_stopped_and_its_model_has_tables():
    assert restart(stopped=True).is_over
    assert not restart().has_tables
    assert restart(arrays=("weights/dense/kernel", "weights/dense/basis_1")).has_tables


def test_the_same_run_is_accepted():
    found = restart()
    flags = "--ckpt_every_s 9 --loader cached --timeout 60 --eval_bool False"
    found.check_run(run_fingerprint("nt3", params(flags)))
    found.check_plan(plan(2))
    found.check_data(DATA)
    restart(num_ranks=4).check_plan(plan(4))


def refused(check, *args):
    with pytest.raises(CheckpointError, match=re.escape(str(HERE))) as caught:
        check(*args)
    return str(caught.value)


def test_differences_are_named():
    found = restart()
    other = run_fingerprint("nt3", params("--batch_size 7 --rng_seed 1"))
    message = refused(found.check_run, other)
    assert "the checkpoint has batch_size = 20, this run batch_size = 7" in message
    assert "the checkpoint has rng_seed = 7102, this run rng_seed = 1" in message
    message = refused(found.check_run, run_fingerprint("p1b1", params()))
    assert "benchmark = 'nt3', this run benchmark = 'p1b1'" in message
    assert "test = {'x.csv': 7}" in refused(found.check_data, DATA | {"test": {"x.csv": 8}})
    assert "this run epochs_per_rank = 5" in refused(found.check_plan, plan(2, epochs_per_rank=5))
    message = refused(check_equal, HERE, {"a": 1}, {f"weights/{i}": i for i in range(7)})
    assert "the checkpoint has no weights/0, this run weights/0 = 0" in message
    assert "and 3 more" in message


def test_a_checkpoint_of_something_else_is_refused():
    checkpoint = SimpleNamespace(directory=HERE, position=Position(1, 0), facts={"epoch": 1})
    with pytest.raises(CheckpointError, match=r"epoch-0002.* benchmark"):
        Restart.of(checkpoint, Ranks(1))


def test_a_checkpoint_of_another_model_is_refused():
    keras = pytest.importorskip("keras", reason="no Keras backend is installed")
    from candle_p1.training.state import replicated_arrays

    def made(units):
        keras.backend.clear_session()
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(units)])
        model.compile("sgd", "mse")
        return model

    found, arrays = restart(), replicated_arrays(made(5))
    specs = {name: ArraySpec.of(name, array) for name, array in arrays.items()}
    del specs["weights/sequential/dense/bias"]
    found._checkpoint.arrays = specs
    message = refused(found.restore_arrays, made(3))
    kernel = "weights/sequential/dense/kernel"
    assert f"has {kernel} = 'float32 (4, 5)', this run {kernel} = 'float32 (4, 3)'" in message
    assert "the checkpoint has no weights/sequential/dense/bias" in message
