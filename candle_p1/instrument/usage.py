"""The resources that this process has used so far, as counted by Linux."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from math import nan
from operator import add, sub
from pathlib import Path
from typing import NamedTuple

from candle_p1.instrument.power.source import SensorError, read_line

PROC = Path("/proc/self")
RESET_PEAK = "5"  # in clear_refs, see proc(5): resets the peak to the current value


class Usage(NamedTuple):
    """Counts over all threads, since the process began or between two times.

    See `candle_p1.records.types.PhaseUsage`.
    """

    cpu_s: float
    num_voluntary_switches: int
    num_involuntary_switches: int
    num_minor_faults: int
    num_major_faults: int
    read_bytes: float  # NaN if the kernel does not count them

    @classmethod
    def now(cls) -> Usage:
        """Returns the counts so far."""
        used, read_bytes = resource.getrusage(resource.RUSAGE_SELF), nan
        with suppress(SensorError):
            read_bytes = int(read_line(PROC / "io").split()[1])  # the first line is "rchar: N"
        cpu_s, switches = used.ru_utime + used.ru_stime, (used.ru_nvcsw, used.ru_nivcsw)
        return cls(cpu_s, *switches, used.ru_minflt, used.ru_majflt, read_bytes)

    def since(self, earlier: Usage) -> Usage:
        """Returns what was used since an earlier time."""
        return Usage(*map(sub, self, earlier))

    def plus(self, other: Usage) -> Usage:
        """Returns the sum of two usages."""
        return Usage(*map(add, self, other))


def process_age_s(at_s: float) -> float | None:
    """Returns how long this process had existed at a time, in s, to 0.01 s; None if unknown.

    A process that executes another program remains the same one. `at_s` is by time.perf_counter.
    """
    with suppress(OSError, AttributeError):  # the clock is Linux's
        fields = (PROC / "stat").read_text().rpartition(")")[2].split()  # proc(5), from field 3 on
        started_s = int(fields[22 - 3]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
        return max(age_s - (time.perf_counter() - at_s), 0.0)
    return None


def reset_peak_rss() -> None:
    """Resets `peak_rss_bytes`, if the kernel allows it."""
    with suppress(OSError):
        (PROC / "clear_refs").write_text(RESET_PEAK)


def peak_rss_bytes() -> int:
    """Returns the peak resident memory since `reset_peak_rss`."""
    with suppress(OSError):
        for line in (PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pss_bytes() -> int | None:
    """Returns the current proportional set size (shared pages count in part); None if unknown."""
    with suppress(OSError):
        return memory_bytes((PROC / "smaps_rollup").read_text())
    return None


def memory_bytes(smaps_rollup: str) -> int:
    """Returns the proportional set size in the content of a smaps_rollup file.

    Mapped files are left out, if the kernel lists them separately.
    """
    lines = (line.split() for line in smaps_rollup.splitlines()[1:])
    kib = {name.rstrip(":"): int(value) for name, value, _ in lines}
    if "Pss_Anon" in kib:
        return (kib["Pss_Anon"] + kib["Pss_Shmem"]) * 1024
    return kib["Pss"] * 1024
