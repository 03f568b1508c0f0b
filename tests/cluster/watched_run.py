"""NT3's script without a network: a recorded, watched run that loads, and then takes steps.

A step is a sum over all ranks. It needs no TensorFlow, which takes seconds to start on every rank.
STEPS in the environment is the number of steps, and the rank HANGS never comes to the seventh one.
Every rank writes two files into the working directory: rank<rank>.sha256, the digest of the scaled
samples, and rank<rank>.phase, its process id and "train", when all ranks have taken a step.
"""

import hashlib
import os
import time
from pathlib import Path

import numpy as np

from candle_p1 import train
from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import FileSet, Reader, describe_together, loading
from candle_p1.records import environment
from candle_p1.training.lifecycle import recorded_run
from candle_p1.training.measured import describe_rank
from candle_p1.training.setup import check_same_data, make_plan

STEP_S = 0.02


def leave_file(name, text):
    part = Path(f"{name}.part")
    part.write_text(text)
    part.rename(name)  # so that it is never read half-written


def take_steps(run, num_steps):
    for step in range(num_steps):
        run.watchdog.count_steps(1)
        run.comm.allreduce_sum(np.ones(1000))
        time.sleep(STEP_S)
        if step == 5 and os.environ.get("HANGS") == str(run.comm.rank):
            while True:
                pass
        if step == 1:
            leave_file(f"rank{run.comm.rank}.phase", f"{os.getpid()} train")


def run_without_network(benchmark, params, comm, look=lambda run: None):
    """Takes the place of train._run; `look` is called when all ranks have loaded."""
    with recorded_run(benchmark.name, params, comm) as run:
        roles = {role: Path(params[n]) for role, n in benchmark.files.items() if params[n]}
        reader = Reader(FileSet.at(roles), loading(params, comm, 1, run.screen.warn))
        for warning in reader.loading.warnings:
            run.screen.warn(warning)
        with run.phases("load"):
            raw = benchmark.load_data(reader, params)
        with run.phases("digest"):
            reader.digest()
        with run.phases("preprocess"):
            data = benchmark.preprocess(raw, params)
        check_same_data(reader, comm)
        look(run)
        samples = np.ascontiguousarray(data.train.x[0 : len(data.train)])
        leave_file(f"rank{comm.rank}.sha256", hashlib.sha256(samples.tobytes()).hexdigest())
        with run.phases("train"):
            take_steps(run, int(os.environ["STEPS"]))
        run.finish(
            describe_rank(comm, threads=1, device="cpu", num_cores=1),
            data={
                "synthetic": False,
                "loader": params["loader"],
                "num_copies": reader.loading.num_copies,
                "files": describe_together(reader, comm, run.start),
                "num_train": len(data.train),
            },
            plan=make_plan(benchmark, params, len(data.train), comm),
            model={"num_parameters": 0, "optimizer": params["optimizer"]},
            distributed={"backend": "none"},
            training={"epochs": []},
            quality={},
            environment=environment.capture(),
            warnings=list(reader.loading.warnings),
        )
    return None, None


if __name__ == "__main__":
    train._run = run_without_network
    train.main(find_benchmark("nt3"))
