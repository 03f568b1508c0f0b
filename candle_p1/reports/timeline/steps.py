"""Steps of training, found in the stream of allreduces.

A step is one round of allreduces of the gradients. Without marks in the file a new step begins with
the negotiation of a gradient that the running step has had already: a rank asks for a gradient
again only when it has got those of the step before, which all ranks have then negotiated. A
broadcast ends a step, too, so that the training of one model (Horovod's proof at the start of a
run) is not joined to that of another. Where the steps' intervals are given, a gradient belongs to
the one in which its negotiation begins.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from candle_p1.reports.timeline.intervals import RunningUnion
from candle_p1.reports.timeline.messages import US_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from candle_p1.reports.timeline.intervals import Interval

MAX_STEPS = 100_000
"""Steps of which a row is kept, at 64 bytes; later ones are counted."""

TIMES = ("begin", "end", "communication", "negotiate", "allreduce")
COUNTS = ("num_tensors", "num_messages", "bytes")


class GradientStep:
    """A step under way.

    Attributes:
        communication: From when the first rank asks for a gradient to when it is reduced.
        negotiate: Of this, until all ranks have asked.
        allreduce: From when its turn has come to the end.
        num_messages: Complete ones.
        num_bytes: Of its gradients, where their sizes are known.
    """

    __slots__ = (
        "allreduce",
        "communication",
        "index",
        "negotiate",
        "num_bytes",
        "num_messages",
        "tensors",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.communication, self.negotiate, self.allreduce = (RunningUnion() for _ in range(3))
        self.tensors: set[int] = set()
        self.num_messages = self.num_bytes = 0


class Steps:
    """Assigns gradients to steps and keeps a row for each.

    Args:
        given: The steps' intervals, where they are known, in order; each has its row, also one in
            which nothing is reduced, of zeros.

    Attributes:
        num: Those given, or those begun so far.
    """

    def __init__(self, given: Iterable[Interval] | None = None) -> None:
        self._given = None if given is None else list(given)
        self._running: GradientStep | None = None
        self._columns = {name: array("q") for name in TIMES + COUNTS}
        self.num = len(self._given or ())
        self._extend()

    def place(self, pid: int, us: int) -> GradientStep | None:
        """Returns the step of a gradient whose negotiation begins; None: it is outside of all."""
        if self._given is not None:
            i = bisect_right(self._given, us, key=lambda interval: interval[0]) - 1
            if i < 0 or us >= self._given[i][1]:
                return None
            if self._running is None or self._running.index != i:
                self._open(i)
        elif self._running is None or pid in self._running.tensors:
            self._open(self.num)
        step = self._running
        assert step is not None
        step.tensors.add(pid)
        return step

    def interrupt(self) -> None:
        """Ends the running step: another sort of communication begins."""
        if self._given is None:
            self._running = None

    def _open(self, index: int) -> None:
        self._running = GradientStep(index)
        self.num = max(self.num, index + 1)
        self._extend()

    def _extend(self) -> None:
        """Makes rows for all steps there are."""
        for column in self._columns.values():
            column.extend([0] * (min(self.num, MAX_STEPS) - len(column)))

    def update(self, step: GradientStep) -> None:
        """Writes the row of a step, at a time when nothing of it is under way."""
        if step.index >= MAX_STEPS:
            return
        values = (
            step.communication.first_us or 0,
            step.communication.last_us or 0,
            step.communication.total_us,
            step.negotiate.total_us,
            step.allreduce.total_us,
            len(step.tensors),
            step.num_messages,
            step.num_bytes,
        )
        for column, value in zip(self._columns.values(), values, strict=True):
            column[step.index] = value

    def to_dict(self) -> dict[str, list[Any]]:
        """Returns a list for each column, units in their names; step i is at index i."""
        columns: dict[str, list[Any]] = {
            f"{name}_s": [us / US_PER_S for us in self._columns[name]] for name in TIMES
        }
        return columns | {name: list(self._columns[name]) for name in COUNTS}
