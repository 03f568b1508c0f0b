"""The phases of a run: how long each takes on each rank, and what it uses of the machine.

One timer is at work in a process at a time, and code that knows nothing of it can tell it of parts
of a phase::

    from candle_p1.instrument.phases import part

    with part("parse"):
        ...

Outside of a run that does nothing.
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

Path = tuple[str, ...]


@dataclass
class Phase:
    """A phase of one rank; one that is entered several times adds up.

    Attributes:
        begin_s: When it was first entered, by the timer's clock.
        seconds: Its time, with that of its parts.
        communication_s: Of this, the time in which the rank waited in collectives.
        usage: What it used of the machine; None for a part.
        peak_rss_bytes: The largest resident memory in it; None for a part.
        pss_bytes: The resident memory at its end, of shared pages a fair part; None for phases
            within others.
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
        clock: Returns seconds, monotonic.
        begin: When the first phase began, by the clock; None is when it is entered.

    Attributes:
        phases: The phases so far, by path, in the order in which they were first left.
        failed_in: The innermost phase an exception has left; () if none has.
    """

    def __init__(
        self,
        on_enter: Callable[[Path], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        begin: float | None = None,
    ) -> None:
        self.phases: dict[Path, Phase] = {}
        self._begin = begin
        self._on_enter = on_enter or (lambda path: None)
        self._clock = clock
        self._path: Path = ()
        self._peaks: list[int] = []  # of each phase under way, until its innermost one began
        self._communication_s = 0.0
        self.failed_in: Path = ()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times a phase, within the one now running, and notes what it uses."""
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
    def part(self, name: str) -> Iterator[Path]:
        """Times a part of the phase now running, and no more: for what is entered often."""
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
        """Takes note that this much of the phase now running was spent in a collective."""
        self._communication_s += seconds

    @property
    def peak_rss_bytes(self) -> int:
        """The largest resident memory in any phase so far."""
        return max((phase.peak_rss_bytes or 0 for phase in self.phases.values()), default=0)

    def intervals(self) -> list[tuple[str, float, float]]:
        """Returns name, begin and end, in s by the clock, of the phases that are in no other."""
        return [
            (path[0], phase.begin_s, phase.begin_s + phase.seconds)
            for path, phase in self.phases.items()
            if len(path) == 1
        ]


_running: PhaseTimer | None = None


@contextmanager
def at_work(timer: PhaseTimer) -> Iterator[None]:
    """Makes a timer the one that `part` and `add_communication` tell."""
    global _running
    before, _running = _running, timer
    try:
        yield
    finally:
        _running = before


@contextmanager
def part(name: str) -> Iterator[None]:
    """Times a part of the phase now running in this process, on the thread that runs it."""
    if _running is None:
        yield
    else:
        with _running.part(name):
            yield


def add_communication(seconds: float) -> None:
    """Tells the timer at work of time spent in a collective."""
    if _running is not None:
        _running.add_communication(seconds)


def summarize_phases(
    per_rank: Sequence[Mapping[Path, Phase]], starts: Sequence[float] | None = None
) -> dict[str, Any]:
    """Returns phases as they stand in a run record.

    Args:
        per_rank: The phases of each rank. One that a rank did not enter counts 0 s there.
        starts: When the run began, by the clock of each rank; None is 0 for all.
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
    """Returns one phase of all ranks; None is a rank that did not enter it."""
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
