#!/usr/bin/env python
"""P1B3, for launchers and CANDLE's drivers: ``mpirun -np 2 python p1b3_baseline_keras2.py``."""

from candle_p1.train import Script
from p1b3 import BENCHMARK

script = Script(BENCHMARK)
initialize_parameters = script.initialize_parameters
run = script.run
main = script.main

if __name__ == "__main__":
    main()
