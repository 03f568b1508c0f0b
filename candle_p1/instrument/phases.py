"""The phases of a run: how long each takes on a rank, and the resources that it uses.

At most one timer is active in a process. Code that has no reference to it can time regions of the
current phase; outside a run this does nothing::

    from candle_p1.instrument.phases import region

    with region("parse"):
        ...
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isnan, nan
from operator import add, sub
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.instrument.power.sampler import SensorError, read_line
from candle_p1.records.rank_stats import Bytes, Counts, Seconds
from candle_p1.records.types import PhaseTimes, PhaseUsage


class ClockAnchor(NamedTuple):
    """The time of day, in µs since 1970, and a process's time.perf_counter at the same moment."""

    epoch_us: int
    perf_counter_s: float


def read_anchor() -> ClockAnchor:
    """Reads both clocks several times, and returns the readings that are closest together."""
    readings = []
    for _ in range(10):
        before_ns = time.perf_counter_ns()
        epoch_ns = time.time_ns()
        readings.append((time.perf_counter_ns() - before_ns, before_ns, epoch_ns))
    lasted_ns, before_ns, epoch_ns = min(readings)
    return ClockAnchor(epoch_ns // 1000, (before_ns + lasted_ns / 2) / 1e9)


def union(intervals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the pieces, in order, of which the union of intervals consists.

    Both are begins and ends, float64, with the shapes (intervals, 2) and (pieces, 2). An interval
    that ends before it begins, by clocks that were read late, is empty.
    """
    begins, ends = intervals[np.argsort(intervals[:, 0])].T
    ends = np.maximum.accumulate(np.maximum(begins, ends))
    is_new = np.append(True, begins[1:] > ends[:-1])[: len(intervals)]
    is_last = np.append(is_new[1:], True)[: len(intervals)]
    return np.stack([begins[is_new], ends[is_last]], axis=1)


def length(intervals: NDArray[np.float64]) -> float:
    """Returns the sum of the lengths of intervals, shape (intervals, 2)."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


PROC = Path("/proc/self")


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
        (PROC / "clear_refs").write_text("5")  # proc(5)


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


PhasePath = tuple[str, ...]
"""The name of a phase after those of the phases around it: ("broadcast", "wait")."""


@dataclass
class Phase:
    """A phase of one rank; the times of a phase that is entered repeatedly add up."""

    begin_s: float  # when it was first entered, by the timer's clock
    seconds: float = 0.0  # its duration, including its regions
    communication_s: float = 0.0  # of that, in which the rank waited in collectives
    usage: Usage | None = None  # None for a region
    peak_rss_bytes: int | None = None  # likewise
    pss_bytes: int | None = None  # at its end; None for phases within others


class PhaseTimer:
    """Times nested phases of one rank.

    ::

        with phases("broadcast"):
            with phases("wait"):
                ...

    Args:
        on_enter: Called with the path of each phase when it begins, e.g. ("broadcast", "wait").
        clock: Returns seconds; monotonic.
        begin: When the first phase began, by the clock; None: when it is entered.

    Attributes:
        phases: The phases so far, by path.
        failed_in: The innermost phase that an exception has left; () if there was none.
    """

    def __init__(
        self,
        on_enter: Callable[[PhasePath], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        begin: float | None = None,
    ) -> None:
        self.phases: dict[PhasePath, Phase] = {}
        self._begin = begin
        self._on_enter = on_enter or (lambda path: None)
        self._clock = clock
        self._path: PhasePath = ()
        self._peaks: list[int] = []  # of each open phase, up to the start of the one inside it
        self._communication_s = 0.0
        self.failed_in: PhasePath = ()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times a phase, inside the current one, and measures its use of resources."""
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], peak_rss_bytes())
        self._peaks.append(0)
        reset_peak_rss()
        before = Usage.now()
        try:
            with self.region(name) as path:
                self._on_enter(path)
                try:
                    yield
                finally:  # within the phase: reading the memory of a large process takes a while
                    phase = self.phases[path]
                    used = Usage.now().since(before)
                    phase.usage = used if phase.usage is None else phase.usage.plus(used)
                    peak = max(self._peaks.pop(), peak_rss_bytes())
                    phase.peak_rss_bytes = max(peak, phase.peak_rss_bytes or 0)
                    if self._peaks:
                        self._peaks[-1] = max(self._peaks[-1], peak)
                    else:
                        phase.pss_bytes = pss_bytes()
        except BaseException:
            self.failed_in = self.failed_in or path
            raise

    @contextmanager
    def region(self, name: str) -> Iterator[PhasePath]:
        """Times a region of the current phase, and measures nothing else: it costs little."""
        outer, path = self._path, (*self._path, name)
        self._path = path
        communication_s = self._communication_s
        begin, self._begin = self._clock() if self._begin is None else self._begin, None
        phase = self.phases.setdefault(path, Phase(begin))
        try:
            yield path
        finally:
            phase.seconds += self._clock() - begin
            phase.communication_s += self._communication_s - communication_s
            self._path = outer

    def add_communication(self, seconds: float) -> None:
        """Adds to the time that the current phase spent waiting in collectives."""
        self._communication_s += seconds

    @property
    def peak_rss_bytes(self) -> int:
        """The peak resident memory of all phases so far."""
        return max((phase.peak_rss_bytes or 0 for phase in self.phases.values()), default=0)

    def intervals(self) -> list[tuple[str, float, float]]:
        """Returns the name, begin and end, in s by the clock, of each top-level phase."""
        return [
            (path[0], phase.begin_s, phase.begin_s + phase.seconds)
            for path, phase in self.phases.items()
            if len(path) == 1
        ]


_active: PhaseTimer | None = None


@contextmanager
def active(timer: PhaseTimer) -> Iterator[None]:
    """Makes a timer the active one, which `region` and `add_communication` report to."""
    global _active
    before, _active = _active, timer
    try:
        yield
    finally:
        _active = before


@contextmanager
def region(name: str) -> Iterator[None]:
    """Times a region of this process's current phase; to be called on the thread that runs it."""
    if _active is None:
        yield
    else:
        with _active.region(name):
            yield


def add_communication(seconds: float) -> None:
    """Adds to the time that the current phase, if any, spent waiting in collectives."""
    if _active is not None:
        _active.add_communication(seconds)


def summarize_phases(
    per_rank: Sequence[Mapping[PhasePath, Phase]], starts: Sequence[float]
) -> dict[str, PhaseTimes]:
    """Returns the phases as a run record holds them, in the order in which they began.

    A phase that a rank did not enter counts as 0 s there. By each rank's clock, the run began at
    one of `starts`.
    """
    begins = {path: phase.begin_s for phases in per_rank for path, phase in phases.items()}
    paths = sorted(begins, key=lambda path: begins[path])

    def summarize_within(outer: PhasePath) -> dict[str, PhaseTimes]:
        return {
            path[-1]: _summarize(
                [phases.get(path) for phases in per_rank], starts, summarize_within(path)
            )
            for path in paths
            if path[:-1] == outer
        }

    return summarize_within(())


def _summarize(
    phases: Sequence[Phase | None], starts: Sequence[float], regions: dict[str, PhaseTimes]
) -> PhaseTimes:
    entered = [phase for phase in phases if phase is not None]
    facts: dict[str, Any] = {
        "begin": Seconds.over(
            [
                phase.begin_s - start if phase else None
                for phase, start in zip(phases, starts, strict=True)
            ]
        )
    }
    if any(phase.communication_s for phase in entered):
        facts["communication"] = Seconds.over(
            [phase.communication_s if phase else 0.0 for phase in phases]
        )
    if all(phase.usage is not None for phase in entered):
        facts["usage"] = _summarize_usage(phases)
    if regions:
        facts["regions"] = regions
    return PhaseTimes.over([phase.seconds if phase else 0.0 for phase in phases], **facts)


def _summarize_usage(phases: Sequence[Phase | None]) -> PhaseUsage:
    used = [phase.usage if phase else None for phase in phases]
    sections: dict[str, Any] = {}
    if not any(isnan(each.read_bytes) for each in used if each):
        sections["read"] = Bytes.over([each.read_bytes if each else None for each in used])
    if all(phase.pss_bytes is not None for phase in phases if phase):
        sections["pss"] = Bytes.over([phase.pss_bytes if phase else None for phase in phases])
    for name in ("voluntary_switches", "involuntary_switches", "minor_faults", "major_faults"):
        sections[name] = Counts.over([each and getattr(each, f"num_{name}") for each in used])
    return PhaseUsage(
        cpu=Seconds.over([each.cpu_s if each else None for each in used]),
        peak_rss=Bytes.over([(phase.peak_rss_bytes or 0) if phase else None for phase in phases]),
        **sections,
    )
