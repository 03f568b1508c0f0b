"""Loaders do not change a benchmark's losses by a single bit; kernels only by rounding."""

from __future__ import annotations

import os
import tempfile
from functools import partial

import numpy as np
from harness import run_checks

from candle_p1 import train
from candle_p1.benchmark import find_benchmark

FLAGS = {
    "nt3": ["--conv", "8", "20", "1", "8", "10", "1", "--dense", "20", "--noise_gaussian", "True"],
    "p1b1": ["--dense", "40"],
    "p1b2": ["--dense", "40"],
    "p1b3": ["--dense", "40", "--train_steps", "20", "--val_steps", "5", "--test_steps", "5"],
}
LOADERS = ("original", "parallel", "cached", "cached")
NUM_EPOCHS = 3


def losses(name, comm, directory, *more):
    benchmark = find_benchmark(name)
    flags = [*FLAGS[name], "--epochs", str(NUM_EPOCHS), "--epochs_scaling", "weak"]
    flags += ["--output_dir", directory, "--deterministic", "True", "--load_threads", "2", *more]
    history = train.run(benchmark, benchmark.initialize_parameters(argv=flags)).history
    return {key: value for key, value in history.items() if "loss" in key}


def losses_agree(name, comm):
    directory = comm.broadcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    os.environ["CANDLE_DATA_DIR"] = directory
    found = [losses(name, comm, directory, "--loader", loader) for loader in LOADERS]
    assert len(found[0]["val_loss"]) == NUM_EPOCHS
    for loader, other in zip(LOADERS, found, strict=True):
        assert other == found[0], loader
    plain = losses(name, comm, directory, "--kernels", "plain")
    for key, values in plain.items():
        np.testing.assert_allclose(found[0][key], values, rtol=1e-4, err_msg=key)


run_checks(**{name: partial(losses_agree, name) for name in FLAGS})
