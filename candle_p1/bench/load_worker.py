"""A rank of a measuring job: loads a benchmark's files once, as a run does, and says what it took.

``python -m candle_p1.bench.load_worker DIRECTORY``, by itself or under a launcher.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from candle_p1.bench.load_job import LoadJob, LoadOutcome, bind
from candle_p1.bench.memory import MemorySampler
from candle_p1.bench.reads import ReadCounter
from candle_p1.bench.worker import serve
from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import FileSet, Reader, loading
from candle_p1.distributed.comm import Attempt, on_first_rank
from candle_p1.distributed.devices import share_cores
from candle_p1.records.environment import available_cores, core_quota
from candle_p1.training.setup import locate_files

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.distributed.comm import Communicator
    from candle_p1.parameters.parameter_set import ParameterSet

SPECIMEN = "1,0.5,-2\n0,1e-3,12.25\n"


def measure(directory: Path, comm: Communicator) -> LoadOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot load; the same on every rank.
    """
    job = LoadJob.read(directory)
    benchmark = Attempt(lambda: find_benchmark(job.benchmark)).agree(comm)
    params = Attempt(lambda: bind(benchmark, job.flags, job.method, job.threads)).agree(comm)
    files = on_first_rank(lambda: locate_files(benchmark, params), comm)
    threads = (
        job.threads
        or share_cores(comm.local.allgather(available_cores()), comm.local_rank, core_quota())[0]
    )
    _read_specimen(directory, params, comm, threads)
    reader = Reader(files, loading(params, comm, threads))

    with ExitStack() as stack:
        sampler = stack.enter_context(MemorySampler()) if job.samples_memory else None
        counter = ReadCounter()
        comm.barrier()
        start = time.perf_counter()
        load = Attempt(lambda: benchmark.load_data(reader, params))
        elapsed_s = time.perf_counter() - start
        reads = counter.count()
        load.agree(comm)
        reader.digest()  # looks at every value, so that memory written through files counts, too
        memory = sampler.stop() if sampler else []
    return LoadOutcome(
        elapsed_s=elapsed_s,
        file_s=reader.load_s,
        threads=threads,
        matrix_bytes=reader.matrix_bytes,
        digests=reader.digests,
        memory=memory,
        bytes_read=reads.bytes_read if reads else None,
        storage_bytes_read=reads.storage_bytes_read if reads else None,
    )


def _read_specimen(directory: Path, params: ParameterSet, comm: Communicator, threads: int) -> None:
    """Reads some numbers by the method, for what it imports and starts not to be measured."""
    path = directory / "specimen.csv"
    Attempt(lambda: path.write_text(SPECIMEN) if comm.rank == 0 else None).agree(comm)
    here = params.replace({"cache_dir": str(directory), "stage_dir": None})
    reader = Reader(FileSet.of({"specimen": path}), loading(here, comm, threads))
    Attempt(lambda: reader.read("specimen")).agree(comm)


if __name__ == "__main__":
    serve(measure)
