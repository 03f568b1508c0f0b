"""The state of a node around a load: the memory of its processes, and files in its page cache.

Memory is the proportional set size without the pages of files (candle_p1.instrument.phases), in
which a page that ranks share counts once in their sum. The kernel takes about 15 ms per GB for a
sample, so another process takes the samples; even so, do not time a process that is sampled.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from candle_p1.distributed.launch_environment import module_command
from candle_p1.errors import SetupError
from candle_p1.instrument.phases import memory_bytes

INTERVAL_S = 0.05
BLOCK_BYTES = 1 << 20
MAX_RESIDENT = 0.01
"""The share of a cold file that may still be in the cache."""
STATES = ("warm", "cold")

MemorySamples = list[tuple[float, int]]
"""Times by the node's monotonic clock, in s, with bytes."""


class MemorySampler:
    """Samples the memory of this process until `stop`, or until this process ends."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        command = module_command(__name__)
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # printed after the first sample

    def stop(self) -> MemorySamples:
        """Takes a last sample; returns all samples, or [] if the kernel does not support them."""
        output, _ = self._process.communicate("stop\n")
        if self._process.returncode:
            raise RuntimeError(f"the memory sampler ended with code {self._process.returncode}")
        return [(time_s, num_bytes) for time_s, num_bytes in json.loads(output)]


def peak_of_sum_bytes(samples_of_ranks: Sequence[MemorySamples]) -> int | None:
    """Returns the largest sum over ranks at any one time; None if a rank has no samples.

    Each rank counts as its latest sample, and as 0 bytes before its first one.
    """
    import pandas as pd  # the sampling process does not need it

    if not all(samples_of_ranks):
        return None
    ranks = [pd.Series(dict(samples)) for samples in samples_of_ranks]
    known = pd.concat(ranks, axis="columns").sort_index().ffill().fillna(0)
    return int(known.sum(axis="columns").max())


def _sample_parent() -> None:
    file = Path(f"/proc/{os.getppid()}/smaps_rollup")
    samples: MemorySamples = []

    def sample() -> None:
        if file.exists():
            samples.append((time.monotonic(), memory_bytes(file.read_text())))

    sample()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
        sample()
    sample()
    json.dump(samples, sys.stdout)


def prepare_files(state: str, paths: Iterable[Path]) -> None:
    """Reads files into the kernel's page cache (warm), or drops them from it (cold).

    This does not reach caches of the storage itself, such as that of a virtual machine's host.

    Raises:
        OSError: A file cannot be read; the error names it.
        SetupError: The kernel keeps a file's pages, because its file system is in memory or another
            process has mapped it; or the kernel cannot be asked.
    """
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                while state == "warm" and file.read(BLOCK_BYTES):
                    pass
                if state == "cold":
                    os.fsync(file.fileno())  # dirty pages cannot be dropped
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            error.filename = str(path)  # errors of a descriptor do not name the file
            raise
        resident = resident_share(path) if state == "cold" else 0.0
        if resident > MAX_RESIDENT:
            raise SetupError(
                f"{path}: {resident:.0%} of it cannot be dropped from the file cache, so reading it"
                " cold cannot be measured: use a copy on a disk, or --file_cache warm"
            )


def resident_share(path: Path) -> float:
    """Returns the share of a file's pages in the page cache; 1 if the user may not write to it."""
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        return 0.0
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    # ctypes takes addresses of writable mappings only; a private one leaves the file untouched.
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY) as mapped,
    ):
        first = ctypes.c_char.from_buffer(mapped)
        failed = mincore(ctypes.byref(first), ctypes.c_size_t(num_bytes), pages)
        del first  # otherwise the mapping cannot be closed
    if failed:
        problem = os.strerror(ctypes.get_errno())
        raise SetupError(f"{path}: the file cache cannot be inspected: {problem}")
    return sum(page & 1 for page in pages) / len(pages)


if __name__ == "__main__":
    _sample_parent()
