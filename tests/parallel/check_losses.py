"""Loaders do not change a benchmark's losses by a single bit; kernels only by rounding."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np

from candle_p1 import train
from candle_p1.benchmark import find_benchmark
from tests.records import read_record

FLAGS = {
    "nt3": ["--conv", "8", "20", "1", "8", "10", "1", "--dense", "20", "--noise_gaussian", "True"],
    "p1b1": ["--dense", "40"],
    "p1b2": ["--dense", "40"],
    "p1b3": ["--dense", "40", "--train_steps", "20", "--val_steps", "5", "--test_steps", "5"],
}
RUNS = {"original": "original", "parallel": "parallel", "plain": "cached --kernels plain"}
"""The loaders and kernels that are compared."""
NUM_EPOCHS = 2


def losses_agree(name, comm):
    os.environ["CANDLE_DATA_DIR"] = str(Path("data").resolve())
    benchmark = find_benchmark(name)
    flags = [*FLAGS[name], "--epochs", str(NUM_EPOCHS), "--epochs_scaling", "weak"]
    flags += ["--deterministic", "True", "--load_threads", "2", "--output_dir", "out"]
    found, digests = {}, {}
    for i, (run, more) in enumerate(RUNS.items()):
        argv = [*flags, "--experiment_id", name, "--run_id", f"{i}", "--loader", *more.split()]
        history = train.run(benchmark, benchmark.initialize_parameters(argv=argv)).history
        found[run] = {key: values for key, values in history.items() if "loss" in key}
        if comm.rank == 0:  # which has written it
            files = read_record(Path(f"out/{name}/{i}/run.json"))["data"]["files"].values()
            digests[run] = [file["values_sha256"] for file in files]
    expected, plain = found["original"], found.pop("plain")
    assert len(expected["val_loss"]) == NUM_EPOCHS
    assert found == dict.fromkeys(found, expected)
    for key, values in plain.items():
        np.testing.assert_allclose(expected[key], values, rtol=1e-4, err_msg=key)
    assert all(read == digests["original"] for read in digests.values())


CHECKS = [partial(losses_agree, name) for name in FLAGS]
