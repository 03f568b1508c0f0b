"""The memory of processes over time, sampled from outside of them.

What counts is the proportional set size without the pages of files: ``Pss_Anon + Pss_Shmem`` of
``/proc/PID/smaps_rollup``, or ``Pss`` where a kernel does not tell them apart. A page that several
ranks share counts once in their sum.

The kernel walks every page for a sample, about 15 ms per GB, and a thread of the process would wait
for its interpreter lock: a process of its own samples, and what it reads is not counted as read by
the one it watches. Still no timing should come from a process that is sampled.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.instrument.usage import memory_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERVAL_S = 0.05

Samples = list[tuple[float, int]]
"""Times by the node's monotonic clock, in s, and bytes."""


class MemorySampler:
    """Samples the memory of this process, from before the body of ``with`` until `stop`."""

    def __enter__(self) -> MemorySampler:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has taken its first sample
        return self

    def stop(self) -> Samples:
        """Takes a last sample; returns all, none where the kernel does not offer them.

        Raises:
            RuntimeError: The sampling process has failed.
        """
        output, _ = self._process.communicate("stop\n")
        if self._process.returncode:
            raise RuntimeError(f"the memory sampler ended with code {self._process.returncode}")
        return [(time_s, num_bytes) for time_s, num_bytes in json.loads(output)]

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def growth(samples: Samples) -> Samples:
    """Returns the samples less the first of them."""
    return [(time_s, num_bytes - samples[0][1]) for time_s, num_bytes in samples]


def peak_bytes(samples: Samples) -> int:
    """Returns the largest sample."""
    return max(num_bytes for _, num_bytes in samples)


def peak_of_sum_bytes(samples_of_ranks: Sequence[Samples]) -> int:
    """Returns the largest sum over ranks at any one time, which is at most the sum of their peaks.

    The ranks are sampled at times of their own; each holds its last sample until its next, and
    0 bytes before its first.
    """
    in_order = sorted(
        (time_s, rank, num_bytes)
        for rank, samples in enumerate(samples_of_ranks)
        for time_s, num_bytes in samples
    )
    now = [0] * len(samples_of_ranks)
    peak = total = 0
    for _, rank, num_bytes in in_order:
        total += num_bytes - now[rank]
        now[rank] = num_bytes
        peak = max(peak, total)
    return peak


def _sample_parent() -> None:
    """Samples the parent process until a line or the end of standard input; prints the samples."""
    file = Path(f"/proc/{os.getppid()}/smaps_rollup")
    samples: Samples = []

    def sample() -> None:
        if file.exists():
            num_bytes = memory_bytes(file.read_text())
            samples.append((time.monotonic(), num_bytes))

    sample()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
        sample()
    sample()
    json.dump(samples, sys.stdout)


if __name__ == "__main__":
    _sample_parent()
