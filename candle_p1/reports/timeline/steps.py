"""Training steps, found in the stream of allreduces.

A step is one round of allreduces of the gradients. The file does not mark steps. A new one begins
with the negotiation of a gradient that the current step already has: a rank submits a gradient
again only after it has received those of the previous step, which all ranks have then negotiated.
A broadcast also ends a step, so that the training of one model (the self-test at the start of a
run) is not joined to that of another.
"""

from __future__ import annotations

from array import array
from typing import Any

from candle_p1.reports.timeline.events import US_PER_S
from candle_p1.reports.timeline.intervals import RunningUnion

MAX_STEPS = 100_000
"""The number of steps for which a row is kept, at 64 bytes; later steps are only counted."""

TIMES = ("begin", "end", "communication", "negotiate", "allreduce")
COUNTS = ("num_tensors", "num_messages", "bytes")


class GradientStep:
    """A step in progress.

    Attributes:
        communication: From the first rank's submission of a gradient until it is reduced.
        negotiate: The part of this until all ranks have submitted it.
        allreduce: The part from the end of the negotiation.
        num_messages: Complete messages.
        num_bytes: The size of its gradients, as far as it is logged.
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
    """Assigns gradients to steps and keeps a row for each step.

    Attributes:
        num: Steps begun so far.
    """

    def __init__(self) -> None:
        self._current: GradientStep | None = None
        self._columns = {name: array("q") for name in TIMES + COUNTS}
        self.num = 0

    def place(self, pid: int) -> GradientStep:
        """Returns the step of a gradient whose negotiation begins."""
        if self._current is None or pid in self._current.tensors:
            self._current = GradientStep(self.num)
            self.num += 1
            if self.num <= MAX_STEPS:
                for column in self._columns.values():
                    column.append(0)
        self._current.tensors.add(pid)
        return self._current

    def interrupt(self) -> None:
        """Ends the current step, because communication of another kind begins."""
        self._current = None

    def update(self, step: GradientStep) -> None:
        """Writes the row of a step, at a time when none of its gradients is in progress."""
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
        """Returns a list for each column, with units in their names; step i is at index i."""
        columns: dict[str, list[Any]] = {
            f"{name}_s": [us / US_PER_S for us in self._columns[name]] for name in TIMES
        }
        return columns | {name: list(self._columns[name]) for name in COUNTS}
