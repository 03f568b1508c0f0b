"""A rank of a measuring job that loads a benchmark's files once, as a run does.

``python -m candle_p1.bench.load_worker DIRECTORY``, alone or under a launcher.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

from candle_p1.bench.load import LoadJob, LoadOutcome
from candle_p1.bench.memory import MemorySampler
from candle_p1.bench.worker import bind, load_sample, locate, serve
from candle_p1.data.reader import Reader, loading
from candle_p1.distributed.comm import Attempt
from candle_p1.errors import ParameterError

if TYPE_CHECKING:
    from candle_p1.distributed.comm import Communicator


def measure(job: LoadJob, comm: Communicator) -> LoadOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot load; the same on every rank.
    """
    benchmark, params, files = locate(job, comm)
    threads = bind(comm, job.threads)
    load_sample(params, comm, threads)
    reader = Reader(files, loading(params, comm, threads))

    sampler = MemorySampler() if job.purpose == "memory" else None
    before = _bytes_read()
    comm.barrier()
    start = time.perf_counter()
    load = Attempt(lambda: benchmark.load_data(reader, params))
    elapsed_s = time.perf_counter() - start
    after = _bytes_read()
    reads = {name: after[name] - before[name] for name in after}
    load.agree(comm)
    if not reader.table_s:
        raise ParameterError(
            f"{benchmark.name} reads no table with reader.read, so there are no loaders to compare"
        ).on_all_ranks()
    reader.digest()  # touches every value, so that memory-mapped files count as memory too
    memory = sampler.stop() if sampler else []
    return LoadOutcome(
        elapsed_s=elapsed_s,
        file_s=reader.table_s,
        threads=threads,
        matrix_bytes=reader.matrix_bytes,
        digests=reader.digests,
        memory=memory,
        bytes_read=reads.get("bytes_read"),
        storage_bytes_read=reads.get("storage_bytes_read"),
    )


def _bytes_read() -> dict[str, int]:
    """Returns the bytes that this process has read, as the kernel counts them; {} if it does not.

    Bytes read by system calls such as read() count whether or not they come from the page cache.
    They do not include pages of files that are mapped into memory, as pandas 3.1 does with large
    files; the bytes from storage include such pages. Counting itself reads some hundred bytes.
    """
    process = psutil.Process()
    if not hasattr(process, "io_counters"):
        return {}
    counters = process.io_counters()
    return {"bytes_read": counters.read_chars, "storage_bytes_read": counters.read_bytes}


if __name__ == "__main__":
    serve(measure)
