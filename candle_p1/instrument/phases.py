"""The phases of a run: how long each takes on a rank, and what it uses of the machine.

At most one timer is active in a process. Code that has no reference to it can time parts of the
current phase; outside of a run this does nothing::

    from candle_p1.instrument.phases import part

    with part("parse"):
        ...
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.instrument import usage
from candle_p1.instrument.usage import Usage
from candle_p1.records.record import over_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PhasePath = tuple[str, ...]
"""The name of a phase after those of the phases around it: ("broadcast", "wait")."""


@dataclass
class Phase:
    """A phase of one rank; the times of a phase that is entered repeatedly add up.

    Attributes:
        begin_s: When it was first entered, by the timer's clock.
        seconds: Its duration, including its parts.
        communication_s: The time within it that the rank spent waiting in collectives.
        usage: What it used of the machine; None for a part.
        peak_rss_bytes: The peak resident memory during it; None for a part.
        pss_bytes: The proportional set size at its end; None for phases within others.
    """

    begin_s: float
    seconds: float = 0.0
    communication_s: float = 0.0
    usage: Usage | None = None
    peak_rss_bytes: int | None = None
    pss_bytes: int | None = None


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
        self._peaks: list[int] = []  # of each open phase, up to the begin of the one inside it
        self._communication_s = 0.0
        self.failed_in: PhasePath = ()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times a phase, inside the current one, and measures what it uses."""
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], usage.peak_rss_bytes())
        self._peaks.append(0)
        usage.reset_peak_rss()
        before = Usage.now()
        try:
            with self.part(name) as path:
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
    def part(self, name: str) -> Iterator[PhasePath]:
        """Times a part of the current phase, and measures nothing else, so that it costs little."""
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
        """Returns name, begin and end, in s by the clock, of the phases that lie in no other."""
        return [
            (path[0], phase.begin_s, phase.begin_s + phase.seconds)
            for path, phase in self.phases.items()
            if len(path) == 1
        ]


_active: PhaseTimer | None = None


@contextmanager
def active(timer: PhaseTimer) -> Iterator[None]:
    """Makes a timer the active one, which `part` and `add_communication` report to."""
    global _active
    before, _active = _active, timer
    try:
        yield
    finally:
        _active = before


@contextmanager
def part(name: str) -> Iterator[None]:
    """Times a part of this process's current phase; to be called on the thread that runs it."""
    if _active is None:
        yield
    else:
        with _active.part(name):
            yield


def add_communication(seconds: float) -> None:
    """Adds to the time that the current phase, if any, spent waiting in collectives."""
    if _active is not None:
        _active.add_communication(seconds)


def summarize_phases(
    per_rank: Sequence[Mapping[PhasePath, Phase]], starts: Sequence[float] | None = None
) -> dict[str, Any]:
    """Returns phases as they stand in a run record.

    Args:
        per_rank: The phases of each rank. A phase that a rank did not enter counts as 0 s there.
        starts: When the run began, by the clock of each rank; None: at 0 on all.
    """
    starts = starts or [0.0] * len(per_rank)
    paths = {path: phase.begin_s for phases in per_rank for path, phase in phases.items()}
    summary: dict[str, Any] = {}
    for path in sorted(paths, key=lambda path: (len(path), paths[path])):
        siblings = summary
        for name in path[:-1]:
            siblings = siblings[name].setdefault("parts", {})
        siblings[path[-1]] = _summarize([phases.get(path) for phases in per_rank], starts)
    return summary


def _summarize(phases: Sequence[Phase | None], starts: Sequence[float]) -> dict[str, Any]:
    """Returns one phase of all ranks; None stands for a rank that did not enter it."""
    entered = [phase for phase in phases if phase is not None]
    facts: dict[str, Any] = over_ranks([phase.seconds if phase else 0.0 for phase in phases], "s")
    facts["per_rank_begin_s"] = [
        phase.begin_s - start if phase else None
        for phase, start in zip(phases, starts, strict=True)
    ]
    if any(phase.communication_s for phase in entered):
        seconds = [phase.communication_s if phase else 0.0 for phase in phases]
        facts["communication"] = over_ranks(seconds, "s")
    if all(phase.usage is not None for phase in entered):
        facts["usage"] = _summarize_usage([phase for phase in entered if phase.usage is not None])
    return facts


def _summarize_usage(phases: Sequence[Phase]) -> dict[str, Any]:
    used = [phase.usage for phase in phases if phase.usage is not None]
    facts = {
        "cpu": over_ranks([each.cpu_s for each in used], "s"),
        "voluntary_switches": over_ranks([each.num_voluntary_switches for each in used], "num"),
        "involuntary_switches": over_ranks([each.num_involuntary_switches for each in used], "num"),
        "minor_faults": over_ranks([each.num_minor_faults for each in used], "num"),
        "major_faults": over_ranks([each.num_major_faults for each in used], "num"),
        "peak_rss": over_ranks([phase.peak_rss_bytes or 0 for phase in phases], "bytes"),
    }
    if all(each.read_bytes >= 0 for each in used):
        facts["read"] = over_ranks([each.read_bytes for each in used], "bytes")
    pss = [phase.pss_bytes for phase in phases if phase.pss_bytes is not None]
    if len(pss) == len(phases):
        facts["pss"] = over_ranks(pss, "bytes")
    return facts
