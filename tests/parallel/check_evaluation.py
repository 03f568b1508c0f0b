"""On all ranks, the samples of any loader are the same, and evaluations those of one process."""

import hashlib
import tempfile
from functools import partial
from pathlib import Path

import keras
import numpy as np

from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import Reader, loading
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.models.evaluation import Trained
from candle_p1.training.setup import locate_files

NUM_TEST_SAMPLES = {"nt3": 61, "p1b1": 137, "p1b2": 137, "p1b3": 301}  # unequal shares
TOLERANCE = 1e-6


def prepare(name, comm, *flags):
    """Returns benchmark, data and a compiled model with the same random weights on every rank."""
    benchmark = find_benchmark(name)
    params = benchmark.read_parameters(["--dense", "24", *flags])
    files = comm.broadcast(locate_files(benchmark, params) if comm.rank == 0 else None)
    data = benchmark.preprocess(benchmark.load_data(Reader(files), params), params)
    data.test = data.test.first(NUM_TEST_SAMPLES[name])
    keras.utils.set_random_seed(3)
    model = benchmark.build_model(params, data)
    for weight in model.trainable_variables:
        weight.assign(3 * weight)  # predictions that differ from sample to sample
    model.compile(
        optimizer="sgd", loss=benchmark.loss(params), metrics=benchmark.metrics(params),
        jit_compile=False,
    )  # fmt: skip
    return benchmark, params, data, model


def evaluated(prepared, comm, directory):
    benchmark, params, data, model = prepared
    return benchmark.evaluate(Trained(model, data, params, comm, Path(directory), True))


def shares_equal_the_whole(case, comm):
    name, *flags = case.split()
    prepared = prepare(name, comm, *flags)
    assert len(prepared[2].test) == NUM_TEST_SAMPLES[name]
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as alone:
        together = evaluated(prepared, comm, shared)
        whole = evaluated(prepared, SerialCommunicator(), alone)
        names = {path.name for path in Path(alone).iterdir()}
        written = {path.name for path in Path(shared).iterdir()}
        assert written == (names if comm.rank == 0 else set())
    assert together.keys() == whole.keys()
    values = {key: (together[key]["value"], whole[key]["value"]) for key in whole}
    assert any(abs(value) > 0.01 for value, _ in values.values()), values
    for key, (shared_value, value) in values.items():
        assert abs(shared_value - value) <= TOLERANCE * max(1, abs(value)), (key, values)
    assert comm.allgather(together) == [together] * comm.size


CASES = ("nt3 --conv 4 20 1 --pool 10", "p1b1", "p1b1 --model cvae", "p1b2", "p1b3")
FLAGS = {"nt3": ["--noise_gaussian", "True"], "p1b1": [], "p1b2": [], "p1b3": []}
LOADERS = ("original", "parallel", "cached")


def digest(part):
    arrays = map(np.ascontiguousarray, part[0 : len(part)])
    return [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]


def samples_are_the_same(name, comm):
    benchmark, found = find_benchmark(name), []
    for loader in LOADERS:
        argv = [*FLAGS[name], "--loader", loader, "--cache_dir", "caches"]
        params = benchmark.read_parameters(argv)
        files = comm.broadcast(locate_files(benchmark, params) if comm.rank == 0 else None)
        raw = benchmark.load_data(Reader(files, loading(params, comm, 2)), params)
        data = benchmark.preprocess(raw, params)
        found.append([digest(part) for part in (data.train, data.validation, data.test)])
    assert found == found[:1] * len(LOADERS)
    assert comm.allgather(found) == [found] * comm.size


CHECKS = [
    *(partial(shares_equal_the_whole, case) for case in CASES),
    *(partial(samples_are_the_same, name) for name in FLAGS),
]
