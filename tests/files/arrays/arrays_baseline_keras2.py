from arrays import BENCHMARK

from candle_p1.train import Script

if __name__ == "__main__":
    Script(BENCHMARK).main()
