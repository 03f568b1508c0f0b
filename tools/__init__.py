"""Programs for the developers of candle_p1: counting at scale, and what its own instruments cost.

They are not installed; make runs them from the root of the repository.
"""
