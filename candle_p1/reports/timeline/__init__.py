"""Horovod's timeline: reading it, summarizing it, and cutting a piece out of it.

``events`` reads the file as a stream and ``activities`` says what the names in it mean.
``messages``, ``steps`` and ``broadcast`` each follow one question through the stream, and
``summary`` answers all of them in one pass. ``coverage`` keeps what a figure shows of every moment.
``slice`` writes a piece for a trace viewer, with the ``tracks`` of a run's record drawn beside it.

Horovod's ``ts`` are microseconds of the monotonic clock since rank 0's background thread started
within ``hvd.init``; the first event states the time of day at that moment. On Linux that clock and
``time.perf_counter`` differ only by an offset, which `instrument.clock.ClockAnchor`, read just
before ``hvd.init``, gives to within a few microseconds.
"""
