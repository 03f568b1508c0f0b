"""Trains benchmarks one after the other, each by an argument: its name, followed by flags.

The name may be followed by a colon and the parameter file to use in place of the benchmark's own.
"""

from __future__ import annotations

import sys

from candle_p1 import train
from candle_p1.benchmark import find_benchmark

for line in sys.argv[1:]:
    first, *flags = line.split()
    name, _, model_file = first.partition(":")
    benchmark = find_benchmark(name)
    train.run(benchmark, benchmark.initialize_parameters(model_file or None, flags))
