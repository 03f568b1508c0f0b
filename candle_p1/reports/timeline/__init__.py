"""Horovod's timeline: reading it, summing it up, cutting a piece out of it.

``events`` reads the file as a stream, ``activities`` says what its names mean, ``intervals`` unites
and compares intervals, ``messages``, ``steps`` and ``broadcast`` follow one question each through
the stream, ``summary`` answers them all in one pass, ``clock`` relates the timeline's clock to this
program's, ``tracks`` are what is drawn beside it, and ``slice`` writes a piece for a viewer.
"""
