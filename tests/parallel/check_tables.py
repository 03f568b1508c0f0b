"""A first layer that computes with the tables of its inputs, on several ranks."""

import keras
import numpy as np
from engines import compiled, distribute, engine

from candle_p1.data.samples import DataSet, Joined, Samples
from candle_p1.distributed.replicas import broadcast_state
from candle_p1.models import fast
from candle_p1.models.fast.batches import taken_by
from candle_p1.models.fast.layers import Dense
from candle_p1.models.fast.optimizers import SGD
from candle_p1.models.fast.tables import suits, whole_weights, with_tables
from candle_p1.models.saving import describe

NUM_STEPS, BATCH = 20, 6


def tables_train_like_their_rows_in_one_process(comm):
    random = np.random.default_rng(11)
    num_rows, tables = comm.size * NUM_STEPS * BATCH, (random.normal(size=(5, 30)).astype("f4"),)
    indices = (random.integers(5, size=num_rows),)
    rows = Joined(random.normal(size=(num_rows, 1)).astype("f4"), indices, tables)
    samples = Samples(rows, random.normal(size=(num_rows, 1)).astype("f4"))
    steps = np.arange(num_rows).reshape(NUM_STEPS, comm.size, BATCH)

    def built(seed, optimizer, *, by_table):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((31,)), Dense(8, "tanh"), Dense(1)], name="model")
        fast.choose("fast" if by_table else "plain", on_cpu=True)
        if by_table:
            assert suits(model, DataSet(samples, samples, samples), optimizer)
            model = with_tables(model, rows, describe(model))
        compiled(model, optimizer, loss="mse")
        model.optimizer.build(model.trainable_variables)
        return model

    def train(model, which):
        x, y = taken_by(model, samples)[which.ravel()]
        model.fit(x, y, batch_size=len(which[0].ravel()), shuffle=False, verbose=0)
        return np.concatenate([read().ravel() for _, read in whole_weights(model)])

    model = built(7 + comm.rank, distribute(SGD(0.05, momentum=0.9)), by_table=True)
    broadcast_state(model, engine().reducer)
    mine = train(model, steps[:, comm.rank])
    assert len(set(comm.allgather(b"".join(np.array(w).tobytes() for w in model.weights)))) == 1
    whole = train(built(7, SGD(0.05, momentum=0.9), by_table=False), steps)
    alone = train(built(7, SGD(0.05, momentum=0.9), by_table=True), steps[:, comm.rank])
    np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-6)
    assert np.abs(alone - whole).max() > 1e-3, "the comparison would not notice missing averages"
    fast.choose("plain", on_cpu=True)


CHECKS = (tables_train_like_their_rows_in_one_process,)
