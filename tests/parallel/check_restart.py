"""Runs that stop at a step and go on from the checkpoint before it, on as many ranks or on others.

Each case trains a benchmark with a small network once without interruption, and again with an error
at a step, after which the same call goes on. For other numbers of ranks, a first process does the
first part, named "begin", and another one the second, "continue": python check_restart.py DIRECTORY
begin|continue.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import engines  # noqa: F401, which chooses Keras's backend
import keras
import numpy as np

from candle_p1 import train
from candle_p1.benchmark import find_benchmark
from candle_p1.checkpoints.checkpoint import Checkpoint
from candle_p1.distributed.comm import connect
from candle_p1.errors import CandleError
from tests.records import read_record

SMALL = "--epochs 3 --epochs_scaling weak --train_steps 6 --ckpt_save_interval 1"
NT3 = f"{SMALL} --conv 8 20 1 8 10 1 --dense 20 --dropout 0.3"
CASES = [
    (
        f"nt3 {NT3} --momentum 0.9 --warmup_epochs 1 --ckpt_every_steps 4",
        [(0, 5), (1, 0), (2, 3)],
    ),
    (f"nt3 {NT3} --optimizer adam --backward_passes_per_step 2 --ckpt_every_steps 2", [(1, 3)]),
    (
        f"nt3 {NT3} --data_type f16 --check_replicas True --optimizer adam --ckpt_every_steps 4",
        [(1, 4)],
    ),
    (
        f"p1b1 {SMALL} --batch_size 30 --dense 40 --model vae --optimizer adam --reduce_lr True"
        " --early_stop True --patience 1 --data_parallel batch_step --ckpt_every_steps 2",
        [(1, 3)],
    ),
    (
        f"p1b2 {SMALL} --dense 40 --optimizer rmsprop --reshuffle False --ckpt_every_steps 3"
        " --data_type bf16 --check_replicas True",
        [(1, 4)],
    ),
    (
        f"p1b3 {SMALL} --conv 4 10 2 --pool 4 --dense 20 --batch_normalization True"
        " --check_replicas True --ckpt_every_steps 4",
        [(0, 5), (2, 0)],
    ),
]
OTHER_RANKS = (
    "--epochs 8 --batch_size 10 --learning_rate 0.01 --ckpt_save_interval 1 --ckpt_every_steps 10"
    " --conv 8 20 1 8 10 1 --dense 20 --dropout 0.1"
)


class StoppedError(CandleError):
    """What ends a run in a test."""


class Stop(keras.callbacks.Callback):
    """Ends a run, on all ranks, before a step: as an error of the user would."""

    def __init__(self, epoch, step):
        super().__init__()
        self.at = epoch, step

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise StoppedError("stopped by the test").on_all_ranks()


def run(line, *, stop_at=None):
    """Runs a benchmark with its flags; returns whether it has come to its end."""
    name, *flags = line.split()
    benchmark = find_benchmark(name)

    class Stopping(type(benchmark)):
        folder = benchmark.folder

        def callbacks(self, params):
            return [*super().callbacks(params), *([Stop(*stop_at)] if stop_at else [])]

    stopping = Stopping()
    params = stopping.initialize_parameters(argv=flags)
    try:
        train.run(stopping, params)
    except StoppedError:
        return False
    return True


def results(directory):
    """Returns all that a run ends with: arrays, tables, and what the record says about them."""
    checkpoint = Checkpoint(directory / "ckpts/latest")
    arrays = {each: checkpoint.read(each) for each in checkpoint.arrays}
    for rank, own in enumerate(checkpoint.rank_states()):
        arrays |= {f"{rank} {each}": values for each, values in own.items()}
    record = read_record(directory / "run.json")
    tables = [(directory / table).read_bytes() for table in ("history.csv", "training.log")]
    epochs = [(each["epoch"], each["metrics"]) for each in record["training"]["epochs"]]
    ends = [record["training"].get(name) for name in ("stopped", "model_epoch")]
    return arrays, [*tables, epochs, record["quality"], *ends], record


def goes_on_bit_for_bit(number, comm):
    flags, stops = CASES[number]
    flags += f" --output_dir out --experiment_id case{number}"
    assert run(f"{flags} --run_id whole")
    for epoch, step in stops:
        run_id = f"{epoch}-{step}"
        assert not run(f"{flags} --run_id {run_id}", stop_at=(epoch, step))
        assert run(f"{flags} --run_id {run_id}")
        if comm.rank:
            continue
        out = Path(f"out/case{number}")
        (whole, facts, _), (arrays, others, record) = results(out / "whole"), results(out / run_id)
        assert others == facts
        assert arrays.keys() == whole.keys()
        for each, values in whole.items():
            np.testing.assert_array_equal(arrays[each], values, err_msg=each)
        assert record["status"] == "ok"
        before, after = record["segments"]
        assert [before["status"], after["status"]] == ["failed", "ok"]
        assert before["end"] == after["begin"]
        num_steps = record["plan"]["steps_per_epoch"]
        done = after["begin"]["epoch"] * num_steps + after["begin"]["step"]
        assert done <= epoch * num_steps + step
        assert before["lost_steps"] == before["steps"] - done
        assert [each.get("segment") for each in record["training"]["epochs"]] == [
            1 + (i >= after["begin"]["epoch"]) for i in range(len(facts[2]))
        ]


def what_is_saved_within_an_epoch_changes_no_moving_statistics(comm):
    for name, further in {"saving": "", "plain": " --ckpt_every_steps 0"}.items():
        assert run(f"{CASES[-1][0]}{further} --output_dir out --run_id {name}")
    if comm.rank == 0:
        saving, plain = (results(Path("out/EXP000") / name) for name in ("saving", "plain"))
        assert saving[1] == plain[1]
        for name, values in plain[0].items():
            np.testing.assert_array_equal(saving[0][name], values, err_msg=name)


CHECKS = [partial(goes_on_bit_for_bit, number) for number in range(len(CASES))]
ON_ONE_RANK = [CHECKS[0], CHECKS[3]]
CHECKS.append(what_is_saved_within_an_epoch_changes_no_moving_statistics)


def other_ranks(directory, part):
    """Trains NT3 up to a step of its third epoch, or goes on from there."""
    os.chdir(directory)
    comm = connect()
    flags = f"nt3 {OTHER_RANKS} --output_dir out --run_id run"
    is_complete = run(flags, stop_at=(2, 11) if part == "begin" else None)
    assert is_complete == (part == "continue")
    if comm.rank == 0:
        print("ok", part, "on", comm.size)


if __name__ == "__main__":
    other_ranks(*sys.argv[1:])
