"""Horovod's timeline: reading it, summing it up, cutting a piece out of it.

``events`` reads the file as a stream and ``activities`` says what the names in it mean.
``messages``, ``steps`` and ``broadcast`` each follow one question through the stream, and
``summary`` answers all of them in one pass. ``slice`` writes a piece for a trace viewer, with the
``tracks`` of a run's record drawn beside it; ``clock`` relates the timeline's clock to the run's.
"""
