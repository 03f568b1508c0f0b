"""A rank of a measuring job that loads a benchmark's files once, from a source that may be slow.

``python -m candle_p1.bench.read_worker DIRECTORY``, alone or under a launcher.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from candle_p1.bench.read import ReadJob, ReadOutcome
from candle_p1.bench.worker import bind, load_sample, locate, serve
from candle_p1.data.reader import Reader, loading
from candle_p1.data.source import Source, open_together
from candle_p1.distributed.comm import Attempt
from candle_p1.errors import ParameterError
from candle_p1.files import files_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from candle_p1.data.source import OpenSource
    from candle_p1.distributed.comm import Communicator


def measure(job: ReadJob, comm: Communicator) -> ReadOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot load; the same on every rank.
    """
    benchmark, params, files = locate(job, comm)
    threads = bind(comm, job.threads)
    load_sample(params, comm, threads)
    settings = loading(params, comm, threads)
    if job.delay_s:
        settings = replace(settings, open_source=slow_source(job.delay_s))
    if job.num_blocks:
        paths = [file for path in files.paths.values() for file in files_at(path)]
        largest_bytes = max(path.stat().st_size for path in paths)
        settings = replace(settings, block_bytes=max(1, -(-largest_bytes // job.num_blocks)))
    reader = Reader(files, settings)
    comm.barrier()
    start = time.perf_counter()
    load = Attempt(lambda: benchmark.load_data(reader, params))
    elapsed_s = time.perf_counter() - start
    load.agree(comm)
    if not reader.table_s:
        raise ParameterError(
            f"{benchmark.name} reads no table with reader.read, so its ranks do not read together"
        ).on_all_ranks()
    reader.digest()
    reads = {role: log.since_zero() for role, log in reader.reads.items()}
    return ReadOutcome(elapsed_s, reads, reader.digests)


def slow_source(delay_s: float) -> OpenSource:
    """Returns what opens a file of which the reading of every block takes a time more."""

    class SlowSource(Source):
        def read(self, into: memoryview, start: int) -> None:
            """Reads, after a while; the threads that share a block wait at the same time."""
            time.sleep(delay_s)
            super().read(into, start)

    @contextmanager
    def open_slowly(path: Path, comm: Communicator) -> Iterator[Source]:
        with open_together(path, comm) as source:
            yield SlowSource(**vars(source))

    return open_slowly


if __name__ == "__main__":
    serve(measure)
