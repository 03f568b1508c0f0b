"""What no gradient updates, such as the moving statistics of batches, on several ranks."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
from check_restart import CASES, goes_on_bit_for_bit, results
from engines import compiled, distribute

from candle_p1 import train
from candle_p1.benchmark import find_benchmark
from candle_p1.data.batches import EvaluationBatches
from candle_p1.data.samples import Samples
from candle_p1.distributed.callbacks import ReplicaCheck, SharedValidation

BATCH, STEPS = 6, 4


class Counting(keras.layers.Layer):
    """Counts the steps, from a number of each rank's own."""

    def build(self, input_shape):
        self.count = self.add_weight((), "zeros", "int32", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1)
        return inputs


def the_mean_of_the_ranks_is_numpys(comm):
    keras.utils.set_random_seed(7)
    layers, counting = keras.layers, Counting()
    model = keras.Sequential(
        [layers.Input((5,)), layers.BatchNormalization(), counting, layers.Dense(1)]
    )
    compiled(model, distribute(keras.optimizers.SGD(0.01)), loss="mse")
    counting.count.assign(10 * comm.rank)
    x = np.random.default_rng(comm.rank).normal(comm.rank, 1, (BATCH * STEPS, 5)).astype("f4")
    y = x[:, :1]
    held_out = np.linspace(-1, 1, 35, dtype="f4").reshape(7, 5)
    of_ranks = []

    def state():
        return [keras.ops.convert_to_numpy(weight) for weight in model.non_trainable_weights]

    callbacks = [
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: of_ranks.extend(comm.allgather(state()))
        ),
        SharedValidation(EvaluationBatches(Samples(held_out, held_out[:, :1]), 2, comm), comm),
        ReplicaCheck(comm),
    ]
    history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    *means, count = state()
    num_samples = comm.allgather(len(x))
    for mean, each in zip(means, zip(*of_ranks, strict=True), strict=False):
        np.testing.assert_allclose(mean, np.average(each, axis=0, weights=num_samples), rtol=1e-6)
        assert np.abs(each[-1] - mean).max() > 0.01, "the ranks were equal anyway"
    assert count == STEPS, "an integer is rank 0's"
    whole = model.evaluate(held_out, held_out[:, :1], verbose=0)
    np.testing.assert_allclose(history.history["val_loss"][-1], whole, rtol=1e-5)


def a_saved_model_has_the_loss_of_the_record(comm):
    """In plain Keras; and what is saved within an epoch changes nothing in training."""
    kept = []

    class Keeping(type(find_benchmark("p1b3"))):
        folder = find_benchmark("p1b3").folder

        def evaluate(self, trained):
            kept.append(trained.data.test)
            return super().evaluate(trained)

    ((flags, _),) = CASES["p1b3"]
    for name, further in {"saving": "", "plain": " --ckpt_every_steps 0"}.items():
        argv = f"{flags}{further} --save_model True --output_dir out --run_id {name}".split()
        benchmark = Keeping()
        train.run(benchmark, benchmark.read_parameters(argv))
    if comm.rank:
        return
    (saving, others, _), (plain, facts, record) = (
        results(Path("out/EXP000") / name) for name in ("saving", "plain")
    )
    assert others == facts
    for name, values in plain.items():
        np.testing.assert_array_equal(saving[name], values, err_msg=name)
    loaded = keras.saving.load_model("out/EXP000/plain/model.keras", compile=False)
    predicted = loaded.predict(np.asarray(kept[-1].x[:]), verbose=0)
    loss = np.square(predicted - kept[-1].y[:]).mean(dtype=np.float64)
    np.testing.assert_allclose(record["quality"]["loss"]["value"], loss, rtol=1e-6)


def normalized_runs_go_on_bit_for_bit(comm):
    goes_on_bit_for_bit("p1b3", 0, comm)


CHECKS = (
    the_mean_of_the_ranks_is_numpys,
    a_saved_model_has_the_loss_of_the_record,
    normalized_runs_go_on_bit_for_bit,
)
