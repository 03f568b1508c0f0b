"""Horovod's timeline: ``events`` reads it, ``steps`` and ``summary`` say what is in it.

Horovod's ``ts`` are microseconds of the monotonic clock since rank 0's background thread started
within ``hvd.init``; the first event states the time of day at that moment. On Linux that clock and
``time.perf_counter`` differ only by an offset, which `instrument.clock.ClockAnchor`, read just
before ``hvd.init``, gives to within a few microseconds.
"""
