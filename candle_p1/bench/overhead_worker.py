"""A rank of the job that measures the overhead of a run's own measuring.

``python -m candle_p1.bench.overhead_worker DIRECTORY``. Two models with the same weights train in
turn in the same processes, because separate jobs differ by more than the percent to be measured.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import keras

from candle_p1.bench.overhead import OverheadJob, OverheadOutcome
from candle_p1.bench.training import prepare_training
from candle_p1.bench.worker import median_s, serve
from candle_p1.distributed.allreduce_log import allreduce_times
from candle_p1.instrument import collectives, phases
from candle_p1.instrument.collectives import CommunicationLog
from candle_p1.instrument.phases import PhaseTimer
from candle_p1.models.fast.batches import for_fit
from candle_p1.training.callbacks import EpochTimer

if TYPE_CHECKING:
    from candle_p1.bench.training import Training
    from candle_p1.distributed.allreduce_log import AllreduceLog
    from candle_p1.distributed.comm import Communicator

NUM_CALLS = 1000


def measure(job: OverheadJob, comm: Communicator) -> OverheadOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot train; the same on every rank.
    """
    log, phase_timer = CommunicationLog(), PhaseTimer()
    training = prepare_training(job, comm, logs=(log, None))
    allreduces = training.allreduces[0]
    measured_model, bare_model = training.models
    batches = training.batches()

    def train(model: Any, callbacks: list[Any]) -> float:
        timer = _BlockTimer()
        callbacks = [*callbacks, timer]
        model.fit(
            for_fit(batches), epochs=job.num_epochs, shuffle=False, verbose=0, callbacks=callbacks
        )
        return timer.seconds

    def train_measured() -> float:
        measuring: list[Any] = [EpochTimer(0.0, allreduce_times(allreduces, comm))]
        if allreduces:
            count_step = allreduces.count_step
            measuring.append(
                keras.callbacks.LambdaCallback(
                    on_train_batch_begin=lambda batch, logs: count_step()
                )
            )
        with collectives.active(log), phases.active(phase_timer), phase_timer("train"):
            return train(measured_model, measuring)

    def train_bare() -> float:
        return train(bare_model, [])

    seconds: dict[Any, list[float]] = {train_measured: [], train_bare: []}
    for number in range(1 + job.num_rounds):  # the first round traces the models
        order = [train_measured, train_bare]
        for block in order if number % 2 else order[::-1]:
            comm.barrier()
            block_s = block()
            if number:
                seconds[block].append(block_s)
    num_steps = training.plan.steps_per_epoch
    return OverheadOutcome(
        seconds[train_measured],
        seconds[train_bare],
        training.device.threads,
        training.device.name,
        num_steps,
        direct_cost_s(len(bare_model.trainable_weights), num_steps, _unused_log(training)),
    )


def _unused_log(training: Training) -> AllreduceLog | None:
    """Returns another log like that of the measured model."""
    return training.engine.make_log(CommunicationLog(), is_gpu=training.device.is_gpu)


def direct_cost_s(num_gradients: int, steps_per_epoch: int, log: AllreduceLog | None) -> float:
    """Returns the time of measuring one step, measured by itself, in s.

    It consists of the operations in the graph, timed in a graph that holds nothing else; of the
    callbacks before a step; and of reading the table at the end of an epoch, divided by its steps.
    """
    timer = EpochTimer(0.0, lambda: (0.0, 0.0))
    timer.on_epoch_begin(0)
    seconds = median_s(lambda: timer.on_train_batch_begin(0), NUM_CALLS)
    if log is None:
        return seconds
    measured, bare = log.example(num_gradients)
    seconds += median_s(measured, NUM_CALLS) - median_s(bare, NUM_CALLS)
    seconds += median_s(log.count_step, NUM_CALLS)
    return seconds + median_s(log.take, NUM_CALLS) / steps_per_epoch


class _BlockTimer(keras.callbacks.Callback):  # type: ignore[misc]
    """Times epochs, each from its first step until the other callbacks have seen its end.

    It must be the last callback.

    Attributes:
        seconds: The time of all epochs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if batch == 0:
            self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.seconds += time.perf_counter() - self._start


if __name__ == "__main__":
    serve(measure)
