"""Arrays, for launchers and drivers."""

from arrays import BENCHMARK

from candle_p1.train import Script

script = Script(BENCHMARK)
initialize_parameters = script.initialize_parameters
run = script.run
main = script.main

if __name__ == "__main__":
    main()
