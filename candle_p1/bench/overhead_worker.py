"""A rank of the job that finds what measuring costs.

``python -m candle_p1.bench.overhead_worker DIRECTORY``. Two models of the same weights train in
turn, stretch by stretch, in the same processes: jobs differ from each other by more than the
percent that is looked for.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import keras

from candle_p1.bench.overhead_job import OverheadJob, OverheadOutcome
from candle_p1.bench.training import one_epoch, prepare_training
from candle_p1.bench.worker import serve
from candle_p1.benchmark import find_benchmark
from candle_p1.data.batches import TrainBatches
from candle_p1.distributed.allreduce_log import AllreduceLog, allreduce_times
from candle_p1.distributed.comm import Attempt
from candle_p1.instrument import collectives, phases
from candle_p1.instrument.collectives import CommunicationLog
from candle_p1.instrument.phases import PhaseTimer
from candle_p1.models.fast.batches import for_fit
from candle_p1.training.callbacks import EpochTimer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from candle_p1.benchmark import Benchmark
    from candle_p1.distributed.comm import Communicator
    from candle_p1.parameters.parameter_set import ParameterSet

NUM_CALLS = 1000


def measure(directory: Path, comm: Communicator) -> OverheadOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot train; the same on every rank.
    """
    job = OverheadJob.read(directory)

    def bind() -> tuple[Benchmark, ParameterSet]:
        benchmark = find_benchmark(job.benchmark)
        return benchmark, one_epoch(benchmark.read_parameters(job.flags))

    benchmark, params = Attempt(bind).agree(comm)
    log, timer = CommunicationLog(), PhaseTimer()
    allreduces = AllreduceLog(log) if comm.size > 1 else None
    training = prepare_training(benchmark, params, comm, logs=(allreduces, None))
    device, data, plan, (measured_model, bare_model), _ = training
    batches = TrainBatches(data.train, plan, seed=params["rng_seed"], rank=comm.rank, shuffle=True)

    def train(model: Any, callbacks: list[Any]) -> float:
        stretch = _Stretch()
        callbacks = [*callbacks, stretch]
        model.fit(
            for_fit(batches), epochs=job.num_epochs, shuffle=False, verbose=0, callbacks=callbacks
        )
        return stretch.seconds

    def train_measured() -> float:
        measuring: list[Any] = [EpochTimer(0.0, allreduce_times(allreduces, comm))]
        if allreduces:
            count_step = allreduces.count_step
            measuring.append(
                keras.callbacks.LambdaCallback(
                    on_train_batch_begin=lambda batch, logs: count_step()
                )
            )
        with collectives.active(log), phases.active(timer), timer("train"):
            return train(measured_model, measuring)

    def train_bare() -> float:
        return train(bare_model, [])

    seconds: dict[Any, list[float]] = {train_measured: [], train_bare: []}
    for number in range(1 + job.num_rounds):  # the first round traces the models
        order = [train_measured, train_bare]
        for stretch in order if number % 2 else order[::-1]:
            comm.barrier()
            took = stretch()
            if number:
                seconds[stretch].append(took)
    return OverheadOutcome(
        seconds[train_measured],
        seconds[train_bare],
        device.threads,
        device.name,
        plan.batch_size,
        plan.steps_per_epoch,
        direct_cost_s(len(bare_model.trainable_weights), plan.steps_per_epoch, comm.size > 1),
    )


def direct_cost_s(num_gradients: int, steps_per_epoch: int, has_exchange: bool) -> float:
    """Returns what the measuring of one step takes by itself, in s.

    That is the operations in the graph, in one that holds nothing else; the callbacks before a
    step; and the reading of the table at the end of an epoch, shared among its steps.
    """
    timer = EpochTimer(0.0, lambda: (0.0, 0.0))
    timer.on_epoch_begin(0)
    seconds = _median_s(lambda: timer.on_train_batch_begin(0))
    if not has_exchange:
        return seconds
    log = AllreduceLog(CommunicationLog())
    measured, bare = log.example(num_gradients)
    graph_s = _median_s(measured) - _median_s(bare)
    return seconds + _median_s(log.count_step) + graph_s + _median_s(log.take) / steps_per_epoch


def _median_s(work: Callable[[], Any]) -> float:
    """Returns the median time of many calls."""
    seconds = []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class _Stretch(keras.callbacks.Callback):  # type: ignore[misc]
    """Times epochs, each from its first step until all callbacks have heard of its end.

    Must come last in the list.

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
