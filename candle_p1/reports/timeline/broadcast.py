"""The broadcast of the initial weights, as the paper measures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.reports.timeline.activities import NEGOTIATE, TRANSFER
from candle_p1.reports.timeline.intervals import RunningUnion
from candle_p1.reports.timeline.messages import US_PER_S

if TYPE_CHECKING:
    from candle_p1.reports.timeline.activities import Activity


@dataclass(frozen=True)
class BroadcastOverhead:
    """What the initial broadcast took.

    The paper (section 4.2.1, figures 7, 12 and 19) reads the broadcast overhead off the timeline,
    whose first events are negotiate_broadcast, broadcast and mpi_broadcast: it is the time from the
    first negotiation, when the first rank asks for the broadcast, to the end of the last broadcast.
    It went from 43.72 s to 4.65 s on 384 GPUs because ranks no longer waited for the slowest
    loader.

    Ranks of this package meet before they broadcast, so what the paper's figure contains of waiting
    for a slow loader is in the phase broadcast/wait, and the paper's figure is the phase broadcast.

    Attributes:
        begin_s: When the first negotiation begins.
        end_s: When the last broadcast ends.
        overhead_s: From one to the other.
        waiting_s: Of this, with no broadcast under way: ranks that are late, and agreeing.
        broadcast_s: With a broadcast under way: from agreement to end.
        transfer_s: With a library broadcasting.
        num_tensors: Broadcast.
        whole: Every broadcast that was begun has ended.
    """

    begin_s: float
    end_s: float
    overhead_s: float
    waiting_s: float
    broadcast_s: float
    transfer_s: float
    num_tensors: int
    whole: bool


class _Run:
    """Broadcasts with no allreduce between them."""

    def __init__(self) -> None:
        self.negotiate, self.broadcast, self.transfer = (RunningUnion() for _ in range(3))

    def union(self, kind: str) -> RunningUnion:
        """Returns when it did something of a kind (`activities.Activity.kind`)."""
        if kind == NEGOTIATE:
            return self.negotiate
        return self.transfer if kind == TRANSFER else self.broadcast

    @property
    def is_open(self) -> bool:
        """Whether a broadcast is asked for or under way."""
        return bool(self.negotiate.num_open or self.broadcast.num_open)


class InitialBroadcast:
    """Finds the broadcast of the weights.

    Of all runs of broadcasts with no allreduce between them it is the one of the most tensors.
    """

    def __init__(self) -> None:
        self._largest, self._run = _Run(), _Run()

    def begin(self, activity: Activity, us: int) -> None:
        """Takes the begin of a negotiation, a broadcast or a transfer."""
        if activity.operation == "broadcast":
            self._run.union(activity.kind).begin(us)
        elif (
            activity.kind == NEGOTIATE
            and self._run.broadcast.num_intervals
            and not self._run.is_open
        ):
            self._compare()

    def end(self, activity: Activity, us: int) -> None:
        """Takes the end of one."""
        if activity.operation == "broadcast":
            self._run.union(activity.kind).end(us)

    def _compare(self) -> None:
        self._largest = max(self._largest, self._run, key=lambda run: run.negotiate.num_intervals)
        self._run = _Run()

    def overhead(self, last_us: int) -> BroadcastOverhead | None:
        """Returns what the broadcast took; None if there was none.

        Args:
            last_us: When the timeline ends, and with it a broadcast that has not ended.
        """
        self._compare()
        run = self._largest
        whole = not run.is_open
        for union in (run.negotiate, run.broadcast, run.transfer):
            union.end_all(last_us)
        begin_us = run.negotiate.first_us
        ends_us = [us for us in (run.negotiate.last_us, run.broadcast.last_us) if us is not None]
        if begin_us is None or not ends_us:
            return None
        overhead_us = max(ends_us) - begin_us
        return BroadcastOverhead(
            begin_s=begin_us / US_PER_S,
            end_s=max(ends_us) / US_PER_S,
            overhead_s=overhead_us / US_PER_S,
            waiting_s=(overhead_us - run.broadcast.total_us) / US_PER_S,
            broadcast_s=run.broadcast.total_us / US_PER_S,
            transfer_s=run.transfer.total_us / US_PER_S,
            num_tensors=run.negotiate.num_intervals,
            whole=whole,
        )
