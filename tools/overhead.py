"""Measures the overhead of a run's own measuring: phases, steps and the log of communication.

``make bench-overhead``. Two models with the same weights train in turn in the same processes, with
and without measuring, because separate jobs differ by more than the percent to be measured.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import click
import numpy as np

from candle_p1.bench.task import BenchmarkTask, seconds_of
from candle_p1.bench.training import Training, prepare_training
from candle_p1.cluster.launchers import on_this_machine
from candle_p1.distributed.allreduce_log import AllreduceLog, allreduce_times
from candle_p1.distributed.comm import Communicator, connect
from candle_p1.distributed.launch_environment import launcher_variable
from candle_p1.distributed.replicas import broadcast_state
from candle_p1.instrument import collectives, phases
from candle_p1.instrument.collectives import CommunicationLog
from candle_p1.instrument.phases import PhaseTimer
from candle_p1.reports.statistics import median_interval
from candle_p1.training.epochs import EpochTimer
from candle_p1.training.setup import build_model

NUM_CALLS = 1000


def train_s(
    training: Training, model: Any, log: Any, num_epochs: int, comm: Communicator, *, measured: bool
) -> float:
    """Returns the seconds of a block of epochs, of the model with measuring or of the bare one."""
    import keras

    from candle_p1.models.fast.batches import for_fit

    begins, ends = list[float](), list[float]()
    timer = EpochTimer(0.0, allreduce_times(log, comm))

    def begin_epoch(epoch: int, logs: Any) -> None:
        if measured:
            timer.begin_epoch()

    def begin_step(batch: int, logs: Any) -> None:
        if measured:
            timer.begin_steps(1)
            if log:
                log.count_steps(1)
        if batch == 0:
            begins.append(time.perf_counter())

    def end_epoch(epoch: int, logs: Any) -> None:
        if measured:
            timer.end_epoch()
        ends.append(time.perf_counter())

    # From the first step of an epoch until its end has been measured.
    callback = keras.callbacks.LambdaCallback(begin_epoch, end_epoch, None, None, begin_step)
    options = {"epochs": num_epochs, "shuffle": False, "verbose": 0, "callbacks": [callback]}
    with ExitStack() as measuring:
        if measured:
            measuring.enter_context(collectives.active(CommunicationLog()))
            measuring.enter_context(phases.active(phase := PhaseTimer()))
            measuring.enter_context(phase("train"))
        model.fit(for_fit(training.batches()), **options)
    return sum(ends) - sum(begins)


def logging_steps(log: AllreduceLog, num_gradients: int) -> list[Callable[[], Any]]:
    """Returns two functions: a step that does nothing but log, and one that does nothing."""
    import keras

    names = [str(number) for number in range(num_gradients)]
    variables = [keras.Variable(0.0) for _ in names]
    zero = keras.ops.convert_to_tensor(0.0)

    def logged(value: Any) -> Any:
        values = {name: value + number for number, name in enumerate(names)}
        log.note_ready(values, variables, dict.fromkeys(names, 4))
        log.note_done(list(values.values()))
        return value

    def bare(value: Any) -> Any:
        return value + 0

    def call(step: Callable[[Any], Any]) -> Callable[[], Any]:
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            graph = tf.function(step, autograph=False)
            return lambda: graph(zero)
        import jax

        program = jax.jit(step)
        return lambda: (jax.block_until_ready(program(zero)), jax.effects_barrier())

    return [call(logged), call(bare)]


def direct_cost_s(training: Training) -> float:
    """Returns the time of measuring one step, measured by itself, in s.

    It consists of the operations in the graph, timed in a graph that holds nothing else; of the
    callbacks before a step; and of reading the table at the end of an epoch, divided by its steps.
    """
    timer = EpochTimer(0.0, lambda: (0.0, 0.0))
    timer.begin_epoch()
    seconds = seconds_of(lambda: timer.begin_steps(1), NUM_CALLS)
    log = training.engine.make_log(CommunicationLog(), is_gpu=training.device.is_gpu)
    if log is None:
        return seconds
    measured, bare = logging_steps(log, len(training.model.trainable_weights))
    seconds += seconds_of(measured, NUM_CALLS) - seconds_of(bare, NUM_CALLS)
    seconds += seconds_of(lambda: log.count_steps(1), NUM_CALLS)
    return seconds + seconds_of(log.take, NUM_CALLS) / int(training.plan.steps_per_epoch)


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
    training = prepare_training(task, comm)
    engine = training.engine
    log = engine.make_log(CommunicationLog(), is_gpu=training.device.is_gpu)
    what = (training.benchmark, training.params, training.data, training.plan, training.device)
    with_log = build_model(*what, engine, log)
    broadcast_state(with_log, engine.reducer)
    mine: dict[bool, list[float]] = {True: [], False: []}
    for number in range(1 + rounds):
        for measured in (True, False) if number % 2 else (False, True):
            comm.barrier()
            model = with_log if measured else training.model
            block_s = train_s(training, model, log, block_epochs, comm, measured=measured)
            mine[measured].append(block_s)
    outcomes = comm.gather((mine, direct_cost_s(training)))
    if outcomes is None:
        return
    # A block takes as long as on the slowest rank.
    measured_s, bare_s = (
        np.max([times[kind] for times, _ in outcomes], axis=0)[1:]  # the first traces the models
        for kind in (True, False)
    )
    ratios = (measured_s / bare_s).tolist()
    interval = median_interval(ratios)
    low, high = interval or (min(ratios), max(ratios))
    step_s = float(np.median(bare_s)) / block_epochs / training.plan.steps_per_epoch
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
