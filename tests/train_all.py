"""Trains benchmarks one after the other as CANDLE's drivers do, by their scripts.

Each argument is the name of a benchmark, followed by flags. The name may be followed by a colon and
the parameter file to use in place of the benchmark's own.
"""

import importlib
import sys

from candle_p1.benchmark import find_benchmark

for line in sys.argv[1:]:
    first, *flags = line.split()
    name, _, model_file = first.partition(":")
    script = find_benchmark(name).script
    sys.path.insert(0, str(script.parent))
    module = importlib.import_module(script.stem)
    sys.argv = [str(script), *flags]
    module.run(module.initialize_parameters(model_file or None))
