"""Measures the overhead of a run's own measuring: phases, steps and the log of communication.

``make bench-overhead``. Two models with the same weights train in turn in the same processes, with
and without measuring, because separate jobs differ by more than the percent to be measured.
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from candle_p1.bench.task import BenchmarkTask, seconds_of
from candle_p1.bench.training import prepare_training
from candle_p1.cluster.launchers import on_this_machine
from candle_p1.distributed.comm import connect
from candle_p1.distributed.launch_environment import launcher_variable
from candle_p1.instrument import collectives, phases
from candle_p1.instrument.collectives import CommunicationLog
from candle_p1.instrument.phases import PhaseTimer
from candle_p1.reports.statistics import median_interval

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.bench.training import Training
    from candle_p1.distributed.comm import Communicator

NUM_CALLS = 1000


def blocks(training: Training, num_epochs: int, comm: Communicator) -> list[Callable[[], float]]:
    """Returns what trains a block, with measuring and without; each returns its seconds."""
    import keras

    from candle_p1.distributed.allreduce_log import allreduce_times
    from candle_p1.models.fast.batches import for_fit
    from candle_p1.training.callbacks import EpochTimer

    log, batches = training.allreduces[0], training.batches()

    def train(model: Any, callbacks: list[Any]) -> float:
        # From the first step of an epoch until the other callbacks have seen its end.
        begins: list[float] = []
        ends: list[float] = []
        timer = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: begins.extend(
                [time.perf_counter()] * (batch == 0)
            ),
            on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()),
        )
        options = {"shuffle": False, "verbose": 0, "callbacks": [*callbacks, timer]}
        model.fit(for_fit(batches), epochs=num_epochs, **options)
        return sum(ends) - sum(begins)

    def train_measured() -> float:
        callbacks = [EpochTimer(0.0, allreduce_times(log, comm))]
        if log:
            count = log.count_step
            callbacks.append(
                keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_: count())
            )
        timer = PhaseTimer()
        with collectives.active(CommunicationLog()), phases.active(timer), timer("train"):
            return train(training.models[0], callbacks)

    return [train_measured, lambda: train(training.models[1], [])]


def direct_cost_s(training: Training) -> float:
    """Returns the time of measuring one step, measured by itself, in s.

    It consists of the operations in the graph, timed in a graph that holds nothing else; of the
    callbacks before a step; and of reading the table at the end of an epoch, divided by its steps.
    """
    from candle_p1.training.callbacks import EpochTimer

    timer = EpochTimer(0.0, lambda: (0.0, 0.0))
    timer.on_epoch_begin(0)
    seconds = seconds_of(lambda: timer.on_train_batch_begin(0), NUM_CALLS)
    log = training.engine.make_log(CommunicationLog(), is_gpu=training.device.is_gpu)
    if log is None:
        return seconds
    measured, bare = log.example(len(training.models[1].trainable_weights))
    seconds += seconds_of(measured, NUM_CALLS) - seconds_of(bare, NUM_CALLS)
    seconds += seconds_of(log.count_step, NUM_CALLS)
    return seconds + seconds_of(log.take, NUM_CALLS) / training.plan.steps_per_epoch


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("benchmark", default="nt3")
@click.option("--np", "num_ranks", type=click.IntRange(1), default=2)
@click.option("--block_epochs", type=click.IntRange(1), default=10, help="Epochs of a block.")
@click.option("--rounds", type=click.IntRange(1), default=30, help="Blocks of each kind.")
@click.argument("flags", nargs=-1)
def main(
    benchmark: str, num_ranks: int, block_epochs: int, rounds: int, flags: tuple[str, ...]
) -> None:
    """Measure the overhead of measuring; FLAGS go to BENCHMARK."""
    if launcher_variable() is None and num_ranks > 1:
        command = [sys.executable, "-m", "tools.overhead", *sys.argv[1:]]
        sys.exit(subprocess.call(on_this_machine(num_ranks, command).command))
    comm = connect()
    task = BenchmarkTask(benchmark=benchmark, flags=flags)
    task.choose_backend()
    training = prepare_training(task, comm, logs=(CommunicationLog(), None))
    kinds = blocks(training, block_epochs, comm)
    mine: list[list[float]] = [[], []]
    for number in range(1 + rounds):  # the first round traces the models
        for which in (0, 1) if number % 2 else (1, 0):
            comm.barrier()
            block_s = kinds[which]()
            if number:
                mine[which].append(block_s)
    outcomes = comm.gather((mine, direct_cost_s(training)))
    if outcomes is None:
        return
    # A block takes as long as on the slowest rank.
    measured_s, bare_s = (
        [max(block) for block in zip(*(times[which] for times, _ in outcomes), strict=True)]
        for which in (0, 1)
    )
    ratios = [one / other for one, other in zip(measured_s, bare_s, strict=True)]
    interval = median_interval(ratios)
    low, high = interval or (min(ratios), max(ratios))
    step_s = median(bare_s) / block_epochs / training.plan.steps_per_epoch
    direct_s = max(direct_s for _, direct_s in outcomes)
    click.echo(
        f"{benchmark}: {num_ranks} ranks x {training.device.threads} threads on"
        f" {training.device.name}; a step takes {1e3 * step_s:.3g} ms\n"
        "phases, steps and the log of communication change the time of a step by"
        f" {median(ratios) - 1:+.2%} ({'95 % interval' if interval else 'range'} {low - 1:+.2%} to"
        f" {high - 1:+.2%} of {rounds} rounds)\n"
        f"measured by itself, this takes {1e6 * direct_s:.3g} us per step, {direct_s / step_s:.2%}"
    )


if __name__ == "__main__":
    main()
