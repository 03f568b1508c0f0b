"""``python -m candle_p1.cluster.preflight``."""

from candle_p1.cluster.preflight import main

if __name__ == "__main__":
    main()
