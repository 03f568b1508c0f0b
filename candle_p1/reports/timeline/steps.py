"""Training steps, found in the stream of allreduces.

A step is one round of allreduces of the gradients. The file does not mark steps. A new one begins
with the negotiation of a gradient that the current step already has: a rank submits a gradient
again only after it has received those of the previous step, which all ranks have then negotiated.
A broadcast also ends a step, so that the training of one model (the self-test at the start of a
run) is not joined to that of another.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from candle_p1.reports.timeline.events import US_PER_S
from candle_p1.reports.timeline.intervals import RunningUnion

TIMES = ("begin_s", "end_s", "communication_s", "negotiate_s", "allreduce_s")
COUNTS = ("num_tensors", "num_messages", "bytes")
NUM_COLUMNS = len(TIMES + COUNTS)


@dataclass(slots=True, eq=False)
class GradientStep:
    """A step in progress.

    Attributes:
        index: Its number, from 0.
        communication: From the first rank's submission of a gradient until it is reduced.
        negotiate: The part of this until all ranks have submitted it.
        allreduce: The part from the end of the negotiation.
        pids: Its gradients.
        num_messages: Complete messages.
        num_bytes: The size of its gradients, as far as it is logged.
    """

    index: int
    communication: RunningUnion = field(default_factory=RunningUnion)
    negotiate: RunningUnion = field(default_factory=RunningUnion)
    allreduce: RunningUnion = field(default_factory=RunningUnion)
    pids: set[int] = field(default_factory=set)
    num_messages: int = 0
    num_bytes: int = 0


class Steps:
    """Assigns gradients to steps and keeps a row for each step.

    Attributes:
        num: Steps begun so far.
    """

    def __init__(self) -> None:
        self._current: GradientStep | None = None
        self._rows = array("q")
        self.num = 0

    def place(self, pid: int) -> GradientStep:
        """Returns the step of a gradient whose negotiation begins."""
        if self._current is None or pid in self._current.pids:
            self._current = GradientStep(self.num)
            self.num += 1
            self._rows.extend([0] * NUM_COLUMNS)
        self._current.pids.add(pid)
        return self._current

    def interrupt(self) -> None:
        """Ends the current step, because communication of another kind begins."""
        self._current = None

    def update(self, step: GradientStep) -> None:
        """Writes the row of a step, at a time when none of its gradients is in progress."""
        values = (
            step.communication.first_us,
            step.communication.last_us,
            step.communication.total_us,
            step.negotiate.total_us,
            step.allreduce.total_us,
            len(step.pids),
            step.num_messages,
            step.num_bytes,
        )
        start = step.index * NUM_COLUMNS
        self._rows[start : start + NUM_COLUMNS] = array("q", values)

    def to_dict(self) -> dict[str, list[Any]]:
        """Returns a list for each column, with units in their names; step i is at index i."""
        columns = np.array(self._rows).reshape(-1, NUM_COLUMNS).T
        times = dict(zip(TIMES, (columns[: len(TIMES)] / US_PER_S).tolist(), strict=True))
        return times | dict(zip(COUNTS, columns[len(TIMES) :].tolist(), strict=True))
