"""Trains benchmarks one after the other, each by an argument: its name, followed by flags."""

from __future__ import annotations

import sys

from candle_p1 import train
from candle_p1.benchmark import find_benchmark

for line in sys.argv[1:]:
    name, *flags = line.split()
    benchmark = find_benchmark(name)
    train.run(benchmark, benchmark.initialize_parameters(argv=flags))
