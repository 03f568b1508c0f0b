"""P2B1, for launchers and CANDLE's drivers: ``mpirun -np 2 python p2b1_baseline_keras2.py``."""

from candle_p1.train import Script
from p2b1 import BENCHMARK

script = Script(BENCHMARK)
initialize_parameters = script.initialize_parameters
run = script.run
main = script.main

if __name__ == "__main__":
    main()
