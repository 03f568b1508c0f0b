"""Models with a training step of their own, and with several outputs, on several ranks."""

import sys

import keras
import numpy as np
from engines import compiled, distribute

from candle_p1.benchmark import RegressionScore, Samples, Several, Trained
from candle_p1.data.batches import EvaluationBatches
from candle_p1.distributed.callbacks import evaluate_shared
from candle_p1.distributed.comm import SerialCommunicator
from tests.conftest import ROOT

sys.path.append(str(ROOT / "examples/p2b1"))

NUM_INPUTS, BATCH, STEPS = 6, 4, 5


def autoencoder(optimizer):
    """The network of examples/p2b1, whose training step is its own."""
    from p2b1_model import build_autoencoder

    keras.utils.set_random_seed(7)
    model = build_autoencoder(NUM_INPUTS, [5, 2], "elu", 0.0, penalty=0.01)
    return compiled(model, optimizer)


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def batches(comm):
    """The batches of every rank: shape (steps, ranks, batch, inputs)."""
    shape = (STEPS, comm.size, BATCH, NUM_INPUTS)
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def train(model, steps):
    x = np.concatenate(steps)
    model.fit(x, x, batch_size=len(steps[0]), shuffle=False, verbose=0)
    return np.concatenate([weight.numpy().ravel() for weight in model.trainable_weights])


def an_own_step_trains_like_one_process(comm):
    of_ranks = batches(comm)
    mine = train(autoencoder(distribute(sgd())), of_ranks[:, comm.rank])
    whole = train(autoencoder(sgd()), of_ranks.reshape(STEPS, -1, NUM_INPUTS))
    alone = train(autoencoder(sgd()), of_ranks[:, comm.rank])
    assert len({weights.tobytes() for weights in comm.allgather(mine)}) == 1
    np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-6)
    assert np.abs(alone - whole).max() > 1e-3, "the comparison would not notice missing averages"


def several_outputs_are_evaluated_and_scored_by_samples(comm):
    """Batches and shares have unequal sizes, and the first batch the largest losses."""
    inputs = keras.Input((NUM_INPUTS,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    model = keras.Model(inputs, outputs)
    model.compile(loss="mse", metrics={"a": ["mae"]}, jit_compile=False)
    x = batches(comm)[0].reshape(-1, NUM_INPUTS)[:7]
    y = np.arange(7, 0, -1, dtype=np.float32)[:, np.newaxis] ** 2
    y = {"a": y, "b": 2 * y}
    samples = Samples(x, Several(y))
    predicted = model.predict_on_batch(x)
    errors = {f"{name}_loss": np.square(predicted[name] - y[name]).mean() for name in y}
    absolute = np.abs(predicted["a"] - y["a"]).mean()
    for ranks in (comm, SerialCommunicator()):
        found = evaluate_shared(model, EvaluationBatches(samples, 3, ranks), ranks)
        for name, value in {**errors, "a_mae": absolute}.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    trained = Trained(model, None, {"batch_size": 3}, comm, None, synthetic=True)
    for name, score in trained.scores(samples, {name: RegressionScore(1) for name in y}).items():
        np.testing.assert_allclose(score.result()["mse"], errors[f"{name}_loss"], rtol=1e-5)
    for targets in (y["a"], y["a"][:, 0]):
        mean = trained.mean_target(Samples(targets, targets))
        np.testing.assert_allclose(np.squeeze(mean), targets.mean(), rtol=1e-12)


CHECKS = (
    an_own_step_trains_like_one_process,
    several_outputs_are_evaluated_and_scored_by_samples,
)
