"""Trains benchmarks one after the other: argv is a JSON list of [benchmark, flag, ...]."""

from __future__ import annotations

import json
import sys

from candle_p1 import train
from candle_p1.benchmark import find_benchmark

for name, *flags in json.loads(sys.argv[1]):
    benchmark = find_benchmark(name)
    train.run(benchmark, benchmark.initialize_parameters(argv=flags))
