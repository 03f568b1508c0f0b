"""Loaders do not change a benchmark's samples by a single bit, on any rank."""

import hashlib
from functools import partial

import numpy as np

from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import Reader, loading
from candle_p1.training.setup import locate_files

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


CHECKS = [partial(samples_are_the_same, name) for name in FLAGS]
