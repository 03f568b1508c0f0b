"""What layers keep of their own, such as the moving statistics of batches, on several ranks."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
from check_restart import goes_on_bit_for_bit, results, run
from engines import compiled, distribute

from candle_p1 import train
from candle_p1.benchmark import find_benchmark
from candle_p1.data.batches import EvaluationBatches
from candle_p1.data.samples import Samples
from candle_p1.distributed.callbacks import ReplicaCheck, SharedValidation
from candle_p1.distributed.layer_state import average_state, restore_state

NUM_INPUTS, BATCH, STEPS = 5, 6, 4
MOMENTUM, EPSILON = 0.9, 1e-3
NORMALIZED = (
    "--conv 4 10 2 --pool 4 --dense 20 --batch_normalization True --dropout 0.1 --epochs 2"
    " --epochs_scaling weak --train_steps 6 --check_replicas True --save_model True"
    " --ckpt_save_interval 1 --output_dir out --experiment_id p1b3"
)


class Counting(keras.layers.Layer):
    """Counts its calls in training."""

    def build(self, input_shape):
        self.count = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False, name="count"
        )

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1)
        return inputs


def normalized(optimizer):
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((NUM_INPUTS,)),
            layers.BatchNormalization(momentum=MOMENTUM, epsilon=EPSILON),
            Counting(),
            layers.Dropout(0.1),
            layers.Dense(1),
        ]
    )
    return compiled(model, optimizer, loss="mse")


def arrays_of(variables):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def the_mean_of_the_ranks_is_numpys(comm):
    """The moving statistics of the inputs, which numpy computes for all ranks."""
    shape = (comm.size, STEPS, BATCH, NUM_INPUTS)
    scales = np.arange(1, comm.size + 1).reshape(-1, 1, 1, 1)
    x = (scales * np.random.default_rng(3).normal(1, 1, shape)).astype("float32")
    mean, variance = np.zeros((comm.size, NUM_INPUTS)), np.ones((comm.size, NUM_INPUTS))
    for step in range(STEPS):
        mean = MOMENTUM * mean + (1 - MOMENTUM) * x[:, step].mean(axis=1)
        variance = MOMENTUM * variance + (1 - MOMENTUM) * x[:, step].var(axis=1)
    weights = np.full(comm.size, STEPS * BATCH)  # the samples of each rank

    model = normalized(distribute(keras.optimizers.SGD(0.01)))
    _, counter, *_ = model.layers
    counter.count.assign(10 * comm.rank)
    mine = x[comm.rank].reshape(-1, NUM_INPUTS)
    targets = mine[:, :1]
    held_out = EvaluationBatches(Samples(x[0, 0], x[0, 0, :, :1]), 2, comm)
    before = []
    callbacks = [
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: before.extend(comm.allgather(state()))
        ),
        SharedValidation(held_out, comm),
        ReplicaCheck(comm),
    ]

    def state():
        return arrays_of(model.non_trainable_weights)

    history = model.fit(
        mine, targets, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks
    )
    expected = [np.average(each, axis=0, weights=weights) for each in (mean, variance)]
    averaged = state()
    for found, of_numpy in zip(averaged, expected, strict=False):
        np.testing.assert_allclose(found, of_numpy, rtol=1e-5)
    assert np.abs(before[-1][0] - averaged[0]).max() > 0.01, "the ranks were equal anyway"
    assert averaged[2] == STEPS, "an integer is rank 0's"
    whole = model.evaluate(x[0, 0], x[0, 0, :, :1], verbose=0)
    np.testing.assert_allclose(history.history["val_loss"][-1], whole, rtol=1e-5)

    for variable in model.non_trainable_weights:
        variable.assign_add(keras.ops.cast(comm.rank, variable.dtype))
    own = state()
    replaced = average_state(model, comm)
    assert len({str(each) for each in comm.allgather(state())}) == 1
    restore_state(model, replaced)
    assert str(state()) == str(own)


def a_saved_model_has_the_loss_of_the_record(comm):
    """In plain Keras, on the samples of the test; and saving within an epoch changes nothing."""
    benchmark = find_benchmark("p1b3")
    params = benchmark.read_parameters(NORMALIZED.split())
    kept = []

    class Keeping(type(benchmark)):
        folder = benchmark.folder

        def evaluate(self, trained):
            kept.append(trained)
            return super().evaluate(trained)

    assert run("p1b3", f"{NORMALIZED} --run_id saving --ckpt_every_steps 4")
    train.run(Keeping(), params.replace({"run_id": "plain"}))
    if comm.rank:
        return
    (arrays, facts, record), (saving, others, _) = (
        results(Path("out/p1b3") / name) for name in ("plain", "saving")
    )
    assert others == facts
    for name, values in arrays.items():
        np.testing.assert_array_equal(saving[name], values, err_msg=name)
    (trained,) = kept
    loaded = keras.saving.load_model("out/p1b3/plain/model.keras", compile=False)
    test = trained.data.test
    predicted = loaded.predict(np.asarray(test.x[:]), verbose=0)
    loss = np.square(predicted - test.y[:]).mean(dtype=np.float64)
    np.testing.assert_allclose(record["quality"]["loss"]["value"], loss, rtol=1e-6)


def normalized_runs_go_on_bit_for_bit(comm):
    goes_on_bit_for_bit("p1b3", 0, comm)


CHECKS = (
    the_mean_of_the_ranks_is_numpys,
    a_saved_model_has_the_loss_of_the_record,
    normalized_runs_go_on_bit_for_bit,
)
