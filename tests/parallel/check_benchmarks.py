"""The four benchmarks train alike on two ranks, in one process, and with either engine.

The last weights and losses of each are stored in trained/ENGINE/, for a comparison of engines: the
initial weights are drawn by NumPy, because each framework's generator draws its own.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
from engines import NAME, engine, metrics_of_all

from candle_p1.benchmark import find_benchmark
from candle_p1.data.batches import TrainBatches
from candle_p1.data.reader import Reader
from candle_p1.data.samples import join_batches
from candle_p1.distributed.callbacks import ReplicaCheck
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.engine import Engine
from candle_p1.training.setup import build_model, locate_files, make_plan

NUM_EPOCHS = 3
FLAGS = f"--epochs {NUM_EPOCHS} --epochs_scaling weak --dropout 0 --train_steps 4"
OF = {
    "nt3": "--batch_size 10 --momentum 0.9 --conv 16 20 1 16 10 1 --dense 32 20",
    "p1b1": "--batch_size 20 --dense 100 40",
    "p1b2": "--batch_size 20 --dense 100 50 25",
    # At larger rates, differences by rounding grow within the three epochs.
    "p1b3": "--batch_size 20 --learning_rate 0.0025 --dense 100 50 25 10",
}
TOLERANCE = 1e-3
"""Of a difference, relative to the way that the weights have gone."""
CPU = SimpleNamespace(is_gpu=False)


def built(benchmark, params, data, plan, by):
    """Returns the compiled model with weights that every engine starts from."""
    model = build_model(benchmark, params, data, plan, CPU, by)
    rng = np.random.default_rng(5)
    for weight in model.trainable_variables:
        scale = np.sqrt(2 / (weight.shape[0] + weight.shape[-1])) if len(weight.shape) > 1 else 0.01
        weight.assign(rng.normal(scale=scale, size=weight.shape).astype("float32"))
    return model


def weights_of(model):
    every = [keras.ops.convert_to_numpy(each).ravel() for each in model.trainable_variables]
    return np.concatenate(every).astype(float)


def differ_by(one, other, start):
    """Returns the distance of two models, relative to that from where they have started."""
    return np.linalg.norm(one - other) / np.linalg.norm(other - start)


def trains_like_one_process(name, comm):
    benchmark = find_benchmark(name)
    params = benchmark.read_parameters([*FLAGS.split(), *OF[name].split()])
    files = comm.broadcast(locate_files(benchmark, params) if comm.rank == 0 else None)
    data = benchmark.preprocess(benchmark.load_data(Reader(files), params), params)
    plan = make_plan(benchmark, params, len(data.train), comm)
    options = {"seed": 3, "shuffle": True}
    of_ranks = [TrainBatches(data.train, plan, rank=rank, **options) for rank in range(comm.size)]
    mine = of_ranks[comm.rank]

    def train_each_epoch(model, *callbacks):
        set_epoch = keras.callbacks.LambdaCallback(lambda epoch, logs: mine.set_epoch(epoch))
        options = {"epochs": NUM_EPOCHS, "shuffle": False, "verbose": 0}
        return model.fit(mine, callbacks=[set_epoch, *callbacks], **options).history["loss"]

    model = built(benchmark, params, data, plan, engine())
    start = weights_of(model)
    losses = train_each_epoch(model, ReplicaCheck(comm), metrics_of_all(model, comm))
    together = weights_of(model)

    serial = Engine("serial", SerialCommunicator(), engine().backend)
    other = built(benchmark, params, data, plan, serial)
    if comm.rank:  # on its own batches alone
        train_each_epoch(other)
        unaveraged = differ_by(weights_of(other), together, start)
        assert unaveraged > 10 * TOLERANCE, "the comparison would not notice missing averages"
    else:  # on those of all ranks
        for epoch in range(NUM_EPOCHS):
            for batches in of_ranks:
                batches.set_epoch(epoch)
            for step in range(len(mine)):
                other.train_on_batch(*join_batches([batches[step] for batches in of_ranks]))
        distance = differ_by(together, weights_of(other), start)
        assert distance < TOLERANCE, f"the relative distance is {distance:.1g}"
        directory = Path("trained") / NAME
        directory.mkdir(parents=True, exist_ok=True)
        np.savez(directory / f"{name}.npz", start=start, weights=together, losses=losses)


CHECKS = [partial(trains_like_one_process, name) for name in OF]
