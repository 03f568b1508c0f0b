"""``python -m candle_p1.cli``."""

from candle_p1.cli import main

main()
