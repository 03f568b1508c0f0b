"""The phases of a run: how long each takes on a rank, and the resources that it uses.

At most one timer is active in a process. Code that has no reference to it can time regions of the
current phase; outside a run this does nothing::

    from candle_p1.instrument.phases import region

    with region("parse"):
        ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from typing import Any

from candle_p1.instrument import usage
from candle_p1.instrument.usage import Usage
from candle_p1.records.rank_stats import Bytes, Counts, Seconds
from candle_p1.records.types import PhaseTimes, PhaseUsage

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
            self._peaks[-1] = max(self._peaks[-1], usage.peak_rss_bytes())
        self._peaks.append(0)
        usage.reset_peak_rss()
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
                    peak = max(self._peaks.pop(), usage.peak_rss_bytes())
                    phase.peak_rss_bytes = max(peak, phase.peak_rss_bytes or 0)
                    if self._peaks:
                        self._peaks[-1] = max(self._peaks[-1], peak)
                    else:
                        phase.pss_bytes = usage.pss_bytes()
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
