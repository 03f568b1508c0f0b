"""What ranks measure of their communication if one of them is slow."""

from __future__ import annotations

import time
from unittest.mock import patch

import keras
import numpy as np

from candle_p1.distributed import horovod
from candle_p1.distributed.allreduce_log import CAPACITY, AllreduceLog
from candle_p1.distributed.horovod import broadcast_state, distribute_optimizer
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


def trained(comm, slow_rank, compression="none", accumulate=None):
    """Trains a small model for an epoch.

    Returns the log, the timer, what `take` returns, and what the clock waits for.
    """
    keras.utils.set_random_seed(1)
    log, timer = CommunicationLog(), PhaseTimer()
    allreduces = AllreduceLog(log)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    sgd = keras.optimizers.SGD(0.01, gradient_accumulation_steps=accumulate)
    optimizer = distribute_optimizer(sgd, comm, compression, allreduces)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    optimizer.build(model.trainable_variables)
    slow = Slow(SLOW_S if comm.rank == slow_rank else 0.0, allreduces.count_step)
    x = np.ones((NUM_STEPS, 4), "float32")
    with collectives.active(log), phases.active(timer), timer("train"):
        broadcast_state(model, comm)
        model.fit(x, x[:, :3], batch_size=1, verbose=0, callbacks=[slow])
        took = allreduces.take()
    return log, timer, took, allreduces.waits_for


def the_fast_rank_waits_for_the_slow_one(comm):
    _, timer, (exposed_s, allreduce_s), waits_for = trained(comm, slow_rank=1)
    assert waits_for == "tensor"
    waited = comm.allgather((exposed_s, allreduce_s))
    # On a busy machine both wait longer, but by the same time.
    assert waited[0][0] - waited[1][0] > 0.5 * NUM_STEPS * SLOW_S, waited
    assert all(exposed <= allreduce for exposed, allreduce in waited), waited
    assert timer.phases["train",].communication_s >= exposed_s


def every_step_of_every_gradient_is_counted(comm):
    log, *_ = trained(comm, slow_rank=0)
    facts = summarize_communication(comm.allgather(log), logged=True)
    named = {each.name: each for each in facts.collectives}
    kernel, bias = (named[name] for name in named if name.startswith("allreduce"))
    assert kernel.num_calls == bias.num_calls == comm.size * NUM_STEPS
    assert kernel.num_bytes == kernel.num_calls * 4 * 3 * 4
    assert named["broadcast"].num_calls == comm.size
    assert named["broadcast"].num_bytes >= 4 * 15  # the root's weights, once
    assert {each.from_bytes for each in facts.message_sizes} >= {8, 32}


def bytes_are_counted_as_sent_after_compression_and_accumulation(comm):
    """Timed as on GPUs, of which there are none here."""
    with patch.object(horovod, "_is_on_gpu", lambda variable: True):
        log, _, (exposed_s, _), waits_for = trained(
            comm, slow_rank=1, compression="fp16", accumulate=2
        )
    assert waits_for == "element"
    waited = comm.allgather(exposed_s)
    assert waited[0] - waited[1] > 0.5 * NUM_STEPS * SLOW_S, waited
    (kernel, _) = (each for name, each in log.by_name.items() if "allreduce" in name[1])
    assert kernel.num_calls == NUM_STEPS // 2
    assert kernel.num_bytes == kernel.num_calls * (2 * 3 * 4 + 4)  # and the largest element


CHECKS = (
    the_fast_rank_waits_for_the_slow_one,
    every_step_of_every_gradient_is_counted,
    bytes_are_counted_as_sent_after_compression_and_accumulation,
)
