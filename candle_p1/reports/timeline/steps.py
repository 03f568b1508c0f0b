"""Unions of intervals of time, and what is found with them: training steps, and the broadcast.

Fused tensors each log the same activity at nearly the same time, so a sum over tensors would count
it many times. The time that an activity took is the length of the union of its intervals.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.reports.timeline.events import NEGOTIATE, TRANSFER, US_PER_S, Activity

NUM_PIECES = 1024
TIMES = ("begin_s", "end_s", "communication_s", "negotiate_s", "allreduce_s")
COUNTS = ("num_tensors", "num_messages", "bytes")


@dataclass(slots=True)
class RunningUnion:
    """The union of intervals whose starts and ends arrive in order of time, in microseconds.

    Its length, `total_us`, is that up to the last time at which no interval was open.
    """

    total_us: int = 0
    num_intervals: int = 0
    num_open: int = 0
    first_us: int = 0
    last_us: int = 0
    _begin_us: int = 0

    def begin(self, us: int) -> None:
        """Begins an interval."""
        if not self.num_intervals:
            self.first_us = us
        if not self.num_open:
            self._begin_us = us
        self.num_open += 1
        self.num_intervals += 1

    def end(self, us: int) -> None:
        """Ends one of the open intervals; does nothing where none is open."""
        if not self.num_open:
            return
        self.num_open -= 1
        self.last_us = us
        if not self.num_open:
            self.total_us += us - self._begin_us

    def end_all(self, us: int) -> None:
        """Ends all open intervals, for instance where the timeline stops."""
        while self.num_open:
            self.end(us)


@dataclass(slots=True)
class CoverageUnion(RunningUnion):
    """The union of intervals, and how much of every piece of time it covers.

    Time from 0 on is divided into NUM_PIECES pieces. Where an interval ends after the last of them,
    pairs of pieces become one, so a timeline of any length fits into the same memory.
    """

    piece_us: int = 1000
    covered_us: list[int] = field(default_factory=lambda: [0] * NUM_PIECES)

    def end(self, us: int) -> None:
        """Ends one of the open intervals; does nothing where none is open."""
        if self.num_open == 1:
            self._cover(max(self._begin_us, 0), max(us, 0))
        RunningUnion.end(self, us)

    def _cover(self, begin_us: int, end_us: int) -> None:
        while end_us > NUM_PIECES * self.piece_us:
            pairs = zip(self.covered_us[::2], self.covered_us[1::2], strict=True)
            self.covered_us = [a + b for a, b in pairs] + [0] * (NUM_PIECES // 2)
            self.piece_us *= 2
        first, last = begin_us // self.piece_us, end_us // self.piece_us
        for i in range(first, min(last + 1, NUM_PIECES)):
            piece_begin_us = i * self.piece_us
            self.covered_us[i] += min(end_us, piece_begin_us + self.piece_us) - max(
                begin_us, piece_begin_us
            )

    @property
    def shares(self) -> NDArray[np.float64]:
        """The covered share of each piece, from 0 to 1, float64, shape (NUM_PIECES,)."""
        return np.array(self.covered_us, np.float64) / self.piece_us


@dataclass(slots=True, eq=False)
class GradientStep:
    """A step in progress: its number, its gradients, and when they are communicated.

    That is from the first rank's submission until a gradient is reduced; it is negotiated until all
    ranks have submitted it. The bytes are those of the gradients whose size is logged.
    """

    index: int
    communication: RunningUnion = field(default_factory=RunningUnion)
    negotiate: RunningUnion = field(default_factory=RunningUnion)
    allreduce: RunningUnion = field(default_factory=RunningUnion)
    pids: set[int] = field(default_factory=set)
    num_messages: int = 0
    num_bytes: int = 0


class Steps:
    """Training steps, of which each has a row.

    A step is one round of allreduces of the gradients. The file does not mark steps. A new one
    begins with the negotiation of a gradient that the current step already has: a rank submits a
    gradient again only after it has received those of the previous step, which all ranks have then
    negotiated. A broadcast also ends a step, so that the training of one model (the self-test at
    the start of a run) is not joined to that of another.
    """

    def __init__(self) -> None:
        self._current: GradientStep | None = None
        self._rows: list[tuple[int, ...]] = []

    def place(self, pid: int) -> GradientStep:
        """Returns the step of a gradient whose negotiation begins."""
        if self._current is None or pid in self._current.pids:
            self._current = GradientStep(len(self._rows))
            self._rows.append((0,) * len(TIMES + COUNTS))
        self._current.pids.add(pid)
        return self._current

    def interrupt(self) -> None:
        """Ends the current step, because communication of another kind begins."""
        self._current = None

    def update(self, step: GradientStep) -> None:
        """Writes the row of a step, at a time when none of its gradients is in progress."""
        whole, counts = step.communication, (len(step.pids), step.num_messages, step.num_bytes)
        parts_us = (whole.total_us, step.negotiate.total_us, step.allreduce.total_us)
        self._rows[step.index] = (whole.first_us, whole.last_us, *parts_us, *counts)

    def to_dict(self) -> dict[str, list[Any]]:
        """Returns a list for each column, with units in their names; step i is at index i."""
        columns = np.array(self._rows, np.int64).reshape(-1, len(TIMES + COUNTS)).T
        times = dict(zip(TIMES, (columns[: len(TIMES)] / US_PER_S).tolist(), strict=True))
        return times | dict(zip(COUNTS, columns[len(TIMES) :].tolist(), strict=True))


@dataclass(frozen=True)
class BroadcastOverhead:
    """The time that the broadcast of the initial weights took.

    The paper (section 4.2.1, figures 7, 12 and 19) reads the broadcast overhead off the timeline,
    whose first events are negotiate_broadcast, broadcast and mpi_broadcast: it is the time from the
    first negotiation, when the first rank submits a tensor, to the end of the last broadcast. It
    fell from 43.72 s to 4.65 s on 384 GPUs because ranks no longer waited for the slowest loader.

    Ranks of this package wait for each other before they broadcast. The waiting for a slow loader
    that the paper's figure contains is therefore in the phase broadcast/wait of the run's record;
    `after` adds it.

    Attributes:
        begin_s: When the first negotiation begins.
        end_s: When the last broadcast ends.
        overhead_s: The time between the two.
        waiting_s: The part of it without a broadcast in progress: late ranks, and negotiation.
        broadcast_s: The part of it with a broadcast in progress, after negotiation.
        transfer_s: The part of it in which a communication library broadcasts.
        num_tensors: The number of tensors that were broadcast.
        whole: Whether every broadcast that began has ended.
    """

    begin_s: float
    end_s: float
    overhead_s: float
    waiting_s: float
    broadcast_s: float
    transfer_s: float
    num_tensors: int
    whole: bool

    def after(self, wait_s: float) -> BroadcastOverhead:
        """Returns what the paper counts, for ranks of which the first had waited this long."""
        overhead_s, waiting_s = self.overhead_s + wait_s, self.waiting_s + wait_s
        return replace(self, overhead_s=overhead_s, waiting_s=waiting_s)


class InitialBroadcast:
    """Finds the broadcast of the weights.

    It is the one with the most tensors among all sequences of broadcasts without an allreduce
    between them. A sequence is its intervals by kind.
    """

    def __init__(self) -> None:
        self._largest: dict[str, RunningUnion] = defaultdict(RunningUnion)
        self._current: dict[str, RunningUnion] = defaultdict(RunningUnion)

    def begin(self, activity: Activity, us: int) -> None:
        """Takes the start of a negotiation, a broadcast or a transfer."""
        if activity.operation == "broadcast":
            self._current[activity.kind].begin(us)
        elif activity.kind == NEGOTIATE and not any(u.num_open for u in self._current.values()):
            self._compare()

    def end(self, activity: Activity, us: int) -> None:
        """Takes the end of a negotiation, a broadcast or a transfer."""
        if activity.operation == "broadcast":
            self._current[activity.kind].end(us)

    def _compare(self) -> None:
        both = self._largest, self._current
        self._largest = max(both, key=lambda unions: unions[NEGOTIATE].num_intervals)
        self._current = defaultdict(RunningUnion)

    def overhead(self, last_us: int) -> BroadcastOverhead | None:
        """Returns the time that it took until `last_us`, the timeline's end; None without one."""
        self._compare()
        negotiate, broadcast, transfer = (
            self._largest[kind] for kind in (NEGOTIATE, "broadcast", TRANSFER)
        )
        if not negotiate.num_intervals:
            return None
        whole = not (negotiate.num_open or broadcast.num_open)
        for union in (negotiate, broadcast, transfer):
            union.end_all(last_us)
        end_us = max(negotiate.last_us, broadcast.last_us)
        overhead_us = end_us - negotiate.first_us
        return BroadcastOverhead(
            begin_s=negotiate.first_us / US_PER_S,
            end_s=end_us / US_PER_S,
            overhead_s=overhead_us / US_PER_S,
            waiting_s=(overhead_us - broadcast.total_us) / US_PER_S,
            broadcast_s=broadcast.total_us / US_PER_S,
            transfer_s=transfer.total_us / US_PER_S,
            num_tensors=negotiate.num_intervals,
            whole=whole,
        )
