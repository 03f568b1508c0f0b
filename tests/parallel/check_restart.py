"""Runs that stop at a step and go on from the checkpoint before it, on as many ranks or on others.

Each case trains a benchmark with a small network once without interruption, and again with errors
at some steps, after each of which the same call goes on. For other numbers of ranks, a first
process does the first part, named "begin", and another one the second, "continue":
python check_restart.py DIRECTORY begin|continue.
"""

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

SMALL = "--epochs 3 --epochs_scaling weak --train_steps 6 --ckpt_save_interval 1 --power none"
NT3 = f"{SMALL} --conv 4 20 1 --pool 10 --dense 8 --dropout 0.3"
CASES = {
    f"nt3 {NT3} --momentum 0.9 --warmup_epochs 1 --check_replicas True --ckpt_every_steps 4": [
        (0, 5),
        (2, 0),
    ],
    f"p1b2 {SMALL} --dense 40 --optimizer rmsprop --reshuffle False --data_type bf16"
    " --check_replicas True --ckpt_every_steps 3": [(1, 4)],
    f"p1b2 {SMALL} --batch_size 20 --dense 4096 --check_replicas True --ckpt_every_steps 4": [
        (1, 2)
    ],
    # What is saved is half of an average over two passes.
    f"p1b1 {SMALL} --batch_size 30 --dense 40 --model vae --optimizer adam --reduce_lr True"
    " --early_stop True --patience 1 --data_parallel batch_step --backward_passes_per_step 2"
    " --ckpt_every_steps 3": [(1, 4)],
    f"p1b3 {SMALL} --dense 20 --momentum 0.9 --early_stop True --check_replicas True"
    " --val_steps 2 --test_steps 2 --ckpt_every_steps 4": [(1, 2)],
    f"p1b3 {SMALL} --conv 4 10 2 --pool 4 --dense 20 --batch_normalization True --dropout 0.3"
    " --data_type f16 --optimizer adam --check_replicas True --val_steps 2 --test_steps 2"
    " --ckpt_every_steps 4": [(0, 5)],
}
"""The command lines, with the steps before which they are stopped: (epoch, step)."""
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


def assert_equal(one, other):
    """Asserts that two runs end with the same bits."""
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, values in one[0].items():
        np.testing.assert_array_equal(values, other[0][name], err_msg=name)


def goes_on_bit_for_bit(number, comm):
    flags, stops = list(CASES.items())[number]
    flags += f" --output_dir out --experiment_id case{number}"
    assert run(f"{flags} --run_id whole")
    for at in (*stops, None):
        assert run(f"{flags} --run_id stopped", stop_at=at) == (at is None)
    if comm.rank:
        return
    whole, stopped = (results(Path(f"out/case{number}") / each) for each in ("whole", "stopped"))
    assert_equal(whole, stopped)
    record = stopped[2]
    by_table = flags.startswith("p1b3") and "--conv" not in flags
    kernels = record["model"]["fast_kernels"]
    assert ("TableDense" in kernels, "SparseDense" in kernels) == (by_table, "4096" in flags)
    num_steps = record["plan"]["steps_per_epoch"]
    segments = record["segments"]
    assert [each["status"] for each in segments] == ["failed"] * len(stops) + ["ok"]
    begins = [each["begin"]["epoch"] * num_steps + each["begin"]["step"] for each in segments]
    for i, (epoch, step) in enumerate(stops):
        assert segments[i]["end"] == segments[i + 1]["begin"]
        assert begins[i + 1] <= epoch * num_steps + step
        assert segments[i]["lost_steps"] == begins[i] + segments[i]["steps"] - begins[i + 1]
    assert [each.get("segment") for each in record["training"]["epochs"]] == [
        sum(begin < (i + 1) * num_steps for begin in begins) for i in range(len(whole[1][2]))
    ]


def what_is_saved_within_an_epoch_changes_no_moving_statistics(comm):
    """The last case's run saves; this one does not."""
    number = len(CASES) - 1
    assert run(f"{list(CASES)[number]} --ckpt_every_steps 0 --output_dir out --run_id plain")
    if comm.rank == 0:
        saving = results(Path(f"out/case{number}/whole"))
        assert_equal(saving, results(Path("out/EXP000/plain")))


BIT_FOR_BIT = [partial(goes_on_bit_for_bit, number) for number in range(len(CASES))]
CHECKS = [*BIT_FOR_BIT, what_is_saved_within_an_epoch_changes_no_moving_statistics]
OF_STATES = [BIT_FOR_BIT[3], BIT_FOR_BIT[5]]
"""Those in which an engine has most to keep: gradients, random states, means, scales."""


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
