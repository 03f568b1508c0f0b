"""What the ranks of all measuring jobs share."""

from __future__ import annotations

import os
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
from candle_p1.data.reader import FileSet, Reader, loading
from candle_p1.distributed.comm import Attempt, connect, on_first_rank
from candle_p1.distributed.devices import NodeCores
from candle_p1.errors import EXIT_CODE, CandleError
from candle_p1.records import environment
from candle_p1.text import print_error
from candle_p1.training.setup import locate_files

if TYPE_CHECKING:
    from candle_p1.bench.job import Job
    from candle_p1.benchmark import Benchmark
    from candle_p1.distributed.comm import Communicator
    from candle_p1.parameters.parameter_set import ParameterSet

SAMPLE_CSV = "1,0.5,-2\n0,1e-3,12.25\n"


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


def bind(comm: Communicator, threads: int) -> int:
    """Binds this rank to cores of its own, one for each thread; collective.

    As in a run, ranks have no cores of their own if there are too few. Unlike in a run, a rank that
    is alone has no more cores than threads, so that its time can be compared with that of several.

    Args:
        comm: The ranks.
        threads: The threads of each rank; 0 is its share of the cores.

    Returns:
        The number of its threads.
    """
    cores = NodeCores.of(comm)
    num = threads or cores.threads(comm.local_rank)[0]
    mine = cores.own(comm.local_rank, num, os.environ)
    if comm.local_size == 1:
        mine = sorted(cores.of_ranks[0])
    if mine:
        os.sched_setaffinity(0, mine[:num])  # also of the threads that this one is going to start
    return num


def load_sample(params: ParameterSet, comm: Communicator, threads: int) -> None:
    """Loads a few numbers as `params` say, so that imports are not timed later; collective.

    Raises:
        CandleError: Some rank cannot load; the same on every rank.
    """
    directory = Path(sys.argv[1])
    path = directory / "sample.csv"
    on_first_rank(lambda: path.write_text(SAMPLE_CSV), comm)
    here = params.replace({"cache_dir": str(directory), "stage_dir": None})
    reader = Reader(FileSet.of({"sample": path}), loading(here, comm, threads))
    Attempt(lambda: reader.read("sample")).agree(comm)


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
