"""A first layer that takes sparse tensors, on several ranks."""

import keras
import numpy as np
from engines import compiled, distribute, engine

from candle_p1.data.samples import DataSet, Samples
from candle_p1.distributed.replicas import broadcast_state
from candle_p1.models import fast
from candle_p1.models.fast import sparse
from candle_p1.models.fast.batches import taken_by
from candle_p1.models.fast.layers import L2, Dense
from candle_p1.models.fast.optimizers import RMSprop
from candle_p1.ops.updates import Factors

NUM_STEPS, BATCH, WIDTH, UNITS = 20, 60, 4000, 40


def sparse_inputs_train_like_dense_ones_in_one_process(comm):
    """The places of a batch's values are more than ranks exchange at once."""
    random = np.random.default_rng(11)
    num_rows = comm.size * NUM_STEPS * BATCH
    x = random.random((num_rows, WIDTH), "float32")
    x[x > 0.17] = 0
    y = random.normal(size=(num_rows, 3)).astype("float32")
    steps = np.arange(num_rows).reshape(NUM_STEPS, comm.size, BATCH)
    sent = []

    def built(seed, optimizer, *, by_values):
        keras.utils.set_random_seed(seed)
        layers = [Dense(UNITS, "tanh", kernel_regularizer=L2(1e-3)), Dense(3)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers], name="model")
        samples = Samples(x, y)
        data = DataSet(samples, samples, samples)
        if by_values:
            assert sparse.suits(model, data, RMSprop(), (), engine().reducer)
            model = sparse.with_sparse_inputs(model, data, BATCH)
        compiled(model, optimizer, loss="mse")
        model.optimizer.build(model.trainable_variables)
        return model, taken_by(model, samples)

    def train(model, samples, which):
        for each in which:
            model.train_on_batch(*samples[each.ravel()])
        return np.concatenate([np.ravel(each) for each in model.weights])

    fast.choose("fast", on_cpu=True)
    least, sparse.MIN_WEIGHTS = sparse.MIN_WEIGHTS, 1
    reducer = engine().reducer
    given = reducer.fused_update

    def noted(step, weights, gradients, after=()):
        sent.extend(gradients.values())
        return given(step, weights, gradients, after)

    reducer.fused_update = noted
    model, samples = built(7 + comm.rank, distribute(RMSprop(1e-3)), by_values=True)
    broadcast_state(model, engine().reducer)
    mine = train(model, samples, steps[:, comm.rank])
    reducer.fused_update = given
    assert [isinstance(each, Factors) for each in sent] == [True, False, False, False]
    values = model.trainable_weights + model.optimizer.variables
    assert len(set(comm.allgather(b"".join(np.array(each).tobytes() for each in values)))) == 1
    alone = train(*built(7, RMSprop(1e-3), by_values=False), steps[:, comm.rank])
    fast.choose("plain", on_cpu=True)
    whole = train(*built(7, RMSprop(1e-3), by_values=False), steps)
    np.testing.assert_allclose(mine, whole, rtol=1e-3, atol=1e-5)
    assert np.abs(alone - whole).max() > 1e-3, "the comparison would not notice missing averages"
    sparse.MIN_WEIGHTS = least


CHECKS = (sparse_inputs_train_like_dense_ones_in_one_process,)
