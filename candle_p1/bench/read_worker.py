"""A rank of a measuring job that loads a benchmark's files once, from a source that may be slow.

``python -m candle_p1.bench.read_worker DIRECTORY``, alone or under a launcher.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.bench.read import ReadJob, ReadOutcome, is_divided
from candle_p1.bench.worker import bind, load_sample, locate, serve
from candle_p1.data.reader import FileSet, Reader, loading
from candle_p1.data.source import Source, open_together
from candle_p1.distributed.comm import Attempt, SerialCommunicator
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import files_at
from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from candle_p1.data.source import OpenSource
    from candle_p1.distributed.comm import Communicator

COPIED_BYTES = 1 << 24


def measure(job: ReadJob, comm: Communicator) -> ReadOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot load; the same on every rank.
    """
    benchmark, params, files = locate(job, comm)
    threads = bind(comm, job.threads)
    load_sample(params, comm, threads)
    settings = loading(params, SerialCommunicator() if job.apart else comm, threads)
    if job.delay_s:
        settings = replace(settings, open_source=slow_source(job.delay_s))
    if job.num_blocks:
        paths = [file for path in files.paths.values() for file in files_at(path)]
        largest_bytes = max(path.stat().st_size for path in paths)
        settings = replace(settings, block_bytes=max(1, -(-largest_bytes // job.num_blocks)))
    if job.apart:
        whole = files
        files = Attempt(lambda: part_of(whole, Path(sys.argv[1]), comm)).agree(comm)
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


def part_of(files: FileSet, directory: Path, comm: Communicator) -> FileSet:
    """Returns files with this rank's share of the lines of each; small ones as they are.

    A share begins with the file's first line, whether that is a header or a row.

    Args:
        files: The files.
        directory: Where the shares are written.
        comm: The ranks.

    Raises:
        DataError: A file cannot be read or written.
    """
    paths = {}
    for role, path in files.paths.items():
        paths[role] = path
        if is_divided(path):
            paths[role] = directory / f"{role}-{comm.rank}.csv"
            try:
                _write_share(path, paths[role], comm.rank, comm.size)
            except OSError as error:
                raise DataError(
                    f"cannot write a part of the file to {directory}: {error.strerror}", path
                ) from error
    return FileSet.of(paths)


def _write_share(path: Path, to: Path, rank: int, num_ranks: int) -> None:
    with path.open("rb") as source, to.open("wb") as target:
        head = source.readline()
        ends = []
        for bound in share_bounds(path.stat().st_size - len(head), rank, num_ranks):
            source.seek(max(0, len(head) + bound - 1))
            source.readline()  # the rest of the line that begins before the bound
            ends.append(source.tell())
        first, last = ends
        target.write(head)
        source.seek(first)
        while first < last:
            block = source.read(min(COPIED_BYTES, last - first))
            target.write(block)
            first += len(block)


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
