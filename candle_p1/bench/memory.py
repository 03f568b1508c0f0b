"""The memory of a process over time, sampled by another process.

The quantity is the proportional set size without the pages of files (see
candle_p1.instrument.usage.memory_bytes). A page that several ranks share counts once in their sum.

The kernel walks through all pages for each sample, which takes about 15 ms per GB. A thread would
block the interpreter meanwhile, so a separate process takes the samples; what it reads is not
attributed to the process it watches. Even so, a process that is sampled should not be timed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from candle_p1.distributed.launch_environment import module_command
from candle_p1.instrument.usage import memory_bytes

INTERVAL_S = 0.05

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


def growth(samples: MemorySamples) -> MemorySamples:
    """Returns the difference of each sample from the first one."""
    return [(time_s, num_bytes - samples[0][1]) for time_s, num_bytes in samples]


def peak_of_sum_bytes(samples_of_ranks: Sequence[MemorySamples]) -> int:
    """Returns the largest sum over ranks at any one time, which is at most the sum of their peaks.

    The ranks are sampled at different times. Each counts as its latest sample, and as 0 bytes
    before its first one.
    """
    import pandas as pd  # the sampling process does not need it

    ranks = [pd.Series(dict(samples)) for samples in samples_of_ranks]
    known = pd.concat(ranks, axis="columns").sort_index().ffill().fillna(0)
    return int(known.sum(axis="columns").max())


def _sample_parent() -> None:
    """Samples the parent process until standard input has a line or ends; prints the samples."""
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


if __name__ == "__main__":
    _sample_parent()
