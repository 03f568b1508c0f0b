"""The CANDLE Pilot1 benchmarks, data-parallel through Horovod, measured and explained.

Importing this package loads neither TensorFlow nor MPI. ``docs/architecture.md`` says where things
are.
"""

__version__ = "0.1.0"
