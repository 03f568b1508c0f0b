"""What candle_p1.train calls: set-up, run directory, callbacks, screen."""
