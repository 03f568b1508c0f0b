"""Every loader trains every benchmark to the same losses, bit for bit."""

from __future__ import annotations

import os
import tempfile

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


def losses(name, loader, comm, directory):
    benchmark = find_benchmark(name)
    flags = [*FLAGS[name], "--loader", loader, "--epochs", "2", "--epochs_scaling", "weak"]
    flags += ["--output_dir", directory, "--deterministic", "True", "--load_threads", "2"]
    history = train.run(benchmark, benchmark.initialize_parameters(argv=flags)).history
    return {key: value for key, value in history.items() if "loss" in key}


def loaders_agree(name, comm):
    directory = comm.broadcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    os.environ["CANDLE_DATA_DIR"] = directory
    found = [losses(name, loader, comm, directory) for loader in LOADERS]
    assert len(found[0]["val_loss"]) == 2
    for loader, other in zip(LOADERS, found, strict=True):
        assert other == found[0], loader


def nt3(comm):
    loaders_agree("nt3", comm)


def p1b1(comm):
    loaders_agree("p1b1", comm)


def p1b2(comm):
    loaders_agree("p1b2", comm)


def p1b3(comm):
    loaders_agree("p1b3", comm)


run_checks(nt3, p1b1, p1b2, p1b3)
