"""The broadcast of the initial weights, as the paper measures it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from candle_p1.reports.timeline.activities import NEGOTIATE, TRANSFER
from candle_p1.reports.timeline.events import US_PER_S
from candle_p1.reports.timeline.intervals import RunningUnion

if TYPE_CHECKING:
    from candle_p1.reports.timeline.activities import Activity


@dataclass(frozen=True)
class BroadcastOverhead:
    """The time that the initial broadcast took.

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
        """Returns what the paper counts, for ranks that waited before the first negotiation.

        Args:
            wait_s: How long the first rank that was ready waited for the others.
        """
        overhead_s, waiting_s = self.overhead_s + wait_s, self.waiting_s + wait_s
        return replace(self, overhead_s=overhead_s, waiting_s=waiting_s)


class InitialBroadcast:
    """Finds the broadcast of the weights.

    It is the one with the most tensors among all sequences of broadcasts without an allreduce
    between them. A sequence is its intervals by kind (`activities.Activity.kind`).
    """

    def __init__(self) -> None:
        self._largest: dict[str, RunningUnion] = defaultdict(RunningUnion)
        self._current: dict[str, RunningUnion] = defaultdict(RunningUnion)

    def begin(self, activity: Activity, us: int) -> None:
        """Takes the start of a negotiation, a broadcast or a transfer."""
        if activity.operation == "broadcast":
            self._current[activity.kind].begin(us)
        elif (
            activity.kind == NEGOTIATE
            and self._current
            and not any(union.num_open for union in self._current.values())
        ):
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
        """Returns the time that the broadcast took; None if there was none.

        Args:
            last_us: When the timeline ends, and with it a broadcast still in progress.
        """
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
