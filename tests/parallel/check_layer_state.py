"""What no gradient updates, such as the moving statistics of batches, on several ranks."""

import keras
import numpy as np
from engines import compiled, distribute

from candle_p1.data.batches import EvaluationBatches
from candle_p1.data.samples import Samples
from candle_p1.distributed.callbacks import ReplicaCheck, evaluate_shared
from candle_p1.distributed.replicas import average_state


def the_mean_of_the_ranks_is_numpys(comm):
    keras.utils.set_random_seed(7)
    normalization = keras.layers.BatchNormalization()
    count = normalization.add_weight((), "zeros", "int32", trainable=False)
    model = keras.Sequential([keras.layers.Input((5,)), normalization, keras.layers.Dense(1)])
    compiled(model, distribute(keras.optimizers.SGD(0.01)), loss="mse")
    count.assign(comm.rank + 3)
    x = np.random.default_rng(comm.rank).normal(comm.rank, 1 + comm.rank, (24, 5)).astype("f4")
    y = x[:, :1]
    held_out = np.linspace(-1, 1, 35, dtype="f4").reshape(7, 5)
    of_ranks = []

    def state():
        return [keras.ops.convert_to_numpy(weight) for weight in model.non_trainable_weights]

    def validate(epoch, logs):
        average_state(model, comm)
        batches = EvaluationBatches(Samples(held_out, held_out[:, :1]), 2, comm)
        logs["val_loss"] = evaluate_shared(model, batches, comm)["loss"]

    callbacks = [
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: of_ranks.extend(comm.allgather(state()))
        ),
        keras.callbacks.LambdaCallback(on_epoch_end=validate),
        ReplicaCheck(comm),
    ]
    history = model.fit(x, y, batch_size=6, shuffle=False, verbose=0, callbacks=callbacks)
    averaged, num_samples = state(), comm.allgather(len(x))
    for mean, each in zip(averaged, zip(*of_ranks, strict=True), strict=True):
        if mean.ndim:
            of_numpy = np.average(each, axis=0, weights=num_samples)
            np.testing.assert_allclose(mean, of_numpy, rtol=1e-6)
            assert np.abs(each[-1] - mean).max() > 0.01, "the ranks were equal anyway"
    assert int(count.value) == 3, "an integer is rank 0's"
    whole = model.evaluate(held_out, held_out[:, :1], verbose=0)
    np.testing.assert_allclose(history.history["val_loss"][-1], whole, rtol=1e-5)


CHECKS = (the_mean_of_the_ranks_is_numpys,)
