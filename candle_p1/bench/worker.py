"""What the ranks of all measuring jobs share."""

from __future__ import annotations

import pickle
import statistics
import sys
import timeit
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.bench.job import JOB_FILE, OUTCOMES_FILE
from candle_p1.benchmark import find_benchmark
from candle_p1.distributed.comm import Attempt, connect, on_first_rank
from candle_p1.errors import EXIT_CODE, CandleError
from candle_p1.records import environment
from candle_p1.text import print_error
from candle_p1.training.setup import locate_files

if TYPE_CHECKING:
    from candle_p1.bench.job import Job
    from candle_p1.benchmark import Benchmark
    from candle_p1.data.reader import FileSet
    from candle_p1.distributed.comm import Communicator
    from candle_p1.parameters.parameter_set import ParameterSet


def serve(measure: Callable[[Any, Communicator], Any]) -> None:
    """Measures; rank 0 writes the outcomes of all ranks into the job's directory.

    Args:
        measure: Takes the job and the ranks, and returns what this rank has measured; collective.
    """
    directory = Path(sys.argv[1])
    comm: Communicator | None = None
    try:
        comm = connect()
        job = pickle.loads((directory / JOB_FILE).read_bytes())
        outcomes = comm.gather(measure(job, comm))
        if outcomes is not None:
            (directory / OUTCOMES_FILE).write_bytes(pickle.dumps(outcomes))
    except CandleError as error:  # all ranks raise the same
        print_error(error)
        sys.exit(EXIT_CODE)
    except Exception:
        if comm is None:
            raise
        traceback.print_exc()
        comm.abort(1)


def locate(job: Job, comm: Communicator) -> tuple[Benchmark, ParameterSet, FileSet]:
    """Returns the benchmark of a job, its parameters and its files; collective.

    Raises:
        CandleError: One of them is wrong; the same on every rank.
    """
    benchmark = Attempt(lambda: find_benchmark(job.benchmark)).agree(comm)
    params = Attempt(lambda: job.bind(benchmark)).agree(comm)
    return benchmark, params, on_first_rank(lambda: locate_files(benchmark, params), comm)


def backend_version() -> str:
    """Returns the name and version of Keras's backend, such as "jax 0.10.2"."""
    import keras

    name = str(keras.backend.backend())
    installed = environment.package_versions()
    return next((f"{name} {v}" for k, v in installed.items() if k.startswith(name)), name)


Reduce = Callable[[Sequence[float]], float]
"""Makes one time of several: their median, or the least."""


def median_s(work: Callable[[], Any], num_calls: int) -> float:
    """Returns the median time of several calls, in s, after one that is not timed."""
    return seconds_of(work, num_calls, statistics.median)


def seconds_of(work: Callable[[], Any], num_calls: int, of: Reduce) -> float:
    """Returns what a function makes of the times of several calls, in s; see `median_s`."""
    work()
    return of(timeit.repeat(work, number=1, repeat=num_calls))
