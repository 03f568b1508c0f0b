"""Loaders do not change a benchmark's losses by a single bit."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from candle_p1 import train
from candle_p1.benchmark import find_benchmark
from tests.records import read_record

FLAGS = {
    "nt3": ["--conv", "8", "20", "1", "8", "10", "1", "--dense", "20", "--noise_gaussian", "True"],
    "p1b1": ["--dense", "40"],
    "p1b2": ["--dense", "40"],
    "p1b3": ["--dense", "40", "--train_steps", "20", "--val_steps", "5", "--test_steps", "5"],
}
LOADERS = ("original", "parallel", "cached")


def losses_agree(name, comm):
    os.environ["CANDLE_DATA_DIR"] = str(Path("data").resolve())
    benchmark = find_benchmark(name)
    flags = [*FLAGS[name], "--epochs", "2", "--epochs_scaling", "weak"]
    flags += ["--deterministic", "True", "--load_threads", "2", "--output_dir", "out"]
    found, digests = {}, {}
    for loader in LOADERS:
        argv = [*flags, "--experiment_id", name, "--run_id", loader, "--loader", loader]
        history = train.run(benchmark, benchmark.initialize_parameters(argv=argv)).history
        found[loader] = {key: values for key, values in history.items() if "loss" in key}
        if comm.rank == 0:  # which has written it
            files = read_record(Path(f"out/{name}/{loader}/run.json"))["data"]["files"].values()
            digests[loader] = [file["values_sha256"] for file in files]
    assert len(found["original"]["val_loss"]) == 2
    assert found == dict.fromkeys(found, found["original"])
    assert all(read == digests["original"] for read in digests.values())


CHECKS = [partial(losses_agree, name) for name in FLAGS]
