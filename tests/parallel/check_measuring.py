"""What ranks measure of their communication if one of them is slow."""

import time
from contextlib import nullcontext
from unittest.mock import patch

import keras
import numpy as np
from engines import compiled, distribute, engine

from candle_p1.distributed.allreduce_log import CAPACITY
from candle_p1.distributed.reducers import reducer
from candle_p1.distributed.replicas import broadcast_state
from candle_p1.instrument import collectives, phases
from candle_p1.instrument.collectives import CommunicationLog, summarize_communication
from candle_p1.instrument.phases import PhaseTimer

SLOW_S = 0.02
NUM_STEPS = CAPACITY + 40  # more than the table of times holds


class Slow(keras.callbacks.Callback):
    """Sleeps before every step, and counts it."""

    def __init__(self, seconds, count):
        super().__init__()
        self._seconds, self._count = seconds, count

    def on_train_batch_begin(self, batch, logs=None):
        self._count()
        time.sleep(self._seconds)


def is_timed():
    """Returns whether the engine times allreduces with the framework of this environment."""
    return engine().make_log(CommunicationLog(), is_gpu=False) is not None


def trained(comm, slow_rank, compression="none", accumulate=None):
    """Trains a small model for an epoch.

    Returns the log, the timer, what `take` returns, and what the clock waits for.
    """
    keras.utils.set_random_seed(1)
    log, timer = CommunicationLog(), PhaseTimer()
    allreduces = engine(compression).make_log(log, is_gpu=False)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    sgd = keras.optimizers.SGD(0.01, gradient_accumulation_steps=accumulate)
    optimizer = distribute(sgd, compression, allreduces)
    compiled(model, optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    slow = Slow(SLOW_S if comm.rank == slow_rank else 0.0, lambda: allreduces.count_steps(1))
    x = np.ones((NUM_STEPS, 4), "float32")
    with collectives.active(log), phases.active(timer), timer("train"):
        broadcast_state(model, engine(compression).reducer)
        model.fit(x, x[:, :3], batch_size=1, verbose=0, callbacks=[slow])
        took = allreduces.take()
    return log, timer, took, allreduces.waits_for


def the_fast_rank_waits_and_every_step_of_every_gradient_is_counted(comm):
    if not is_timed():
        return
    log, timer, (exposed_s, allreduce_s), waits_for = trained(comm, slow_rank=1)
    assert waits_for == ("tensor" if engine().name == "horovod" else "element")
    waited = comm.allgather((exposed_s, allreduce_s))
    # On a busy machine both wait longer, but by the same time.
    assert waited[0][0] - waited[1][0] > 0.5 * NUM_STEPS * SLOW_S, waited
    assert all(exposed <= allreduce for exposed, allreduce in waited), waited
    assert timer.phases["train",].communication_s >= exposed_s

    facts = summarize_communication(comm.allgather(log))
    named = {each.name: each for each in facts.collectives}
    averaged = {name: each for name, each in named.items() if name.startswith("allreduce")}
    assert {each.num_calls for each in averaged.values()} == {comm.size * NUM_STEPS}
    sizes = {name: each.num_bytes // each.num_calls for name, each in averaged.items()}
    assert sum(sizes.values()) == 4 * (4 * 3 + 3)
    if engine().name == "jax":
        assert list(sizes) == ["allreduce gradients"]
        return
    assert [sizes[name] for name in sizes if "kernel" in name] == [4 * 4 * 3]
    assert named["broadcast"].num_calls == comm.size
    assert named["broadcast"].num_bytes >= 4 * 15  # the root's weights, once
    assert {each.from_bytes for each in facts.message_sizes} >= {8, 32}


def bytes_are_counted_as_sent_after_compression_and_accumulation(comm):
    """With Horovod, timed as on GPUs, of which there are none here."""
    if not is_timed():
        return
    as_on_gpus = nullcontext()
    if engine().name == "horovod":
        as_on_gpus = patch.object(reducer, "is_on_gpu", lambda variable: True)
    with as_on_gpus:
        log, _, (exposed_s, _), waits_for = trained(comm, 1, compression="fp16", accumulate=2)
    assert waits_for == "element"
    waited = comm.allgather(exposed_s)
    assert waited[0] - waited[1] > 0.5 * NUM_STEPS * SLOW_S, waited
    averaged = [each for name, each in log.by_name.items() if "allreduce gradient" in name[1]]
    assert {each.num_calls for each in averaged} == {NUM_STEPS // 2}
    num_bytes = sum(each.num_bytes for each in averaged)
    assert num_bytes == NUM_STEPS // 2 * (2 * 15 + 4 * 2)  # and the two largest elements


CHECKS = (
    the_fast_rank_waits_and_every_step_of_every_gradient_is_counted,
    bytes_are_counted_as_sent_after_compression_and_accumulation,
)
