"""The moments at which all ranks agree whether to save: about one in a second.

Checkpoints at the end of epochs and every so many steps need no agreement, because all ranks count
alike. The time is another on every rank, and a signal need not reach all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from candle_p1.distributed.comm import Communicator

PERIOD_S = 1.0
MAX_GROWTH = 10
"""A pause may be so much longer, in steps, than the one before: the first steps are no measure."""


class Agreed(NamedTuple):
    """What all ranks know once they have agreed."""

    is_due: bool
    """Rank 0's clock asks for a checkpoint."""
    is_signalled: bool
    """Some rank was told to save and end."""


class SaveTrigger:
    """Agrees on the time and on signals, every so many steps that about a second passes.

    Args:
        comm: The ranks.
        every_s: The time between checkpoints, by rank 0's clock; 0: none is due by time.
        is_signalled: Returns whether this rank was told to save and end.
        clock: Returns seconds; monotonic.
    """

    def __init__(
        self,
        comm: Communicator,
        every_s: float,
        is_signalled: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comm, self._every_s = comm, every_s
        self._is_signalled, self._clock = is_signalled, clock
        self._saved_s = self._agreed_s = clock()
        self._steps_since = 0
        self._pause = 1

    def step(self, num: int = 1) -> Agreed:
        """Counts steps up to one that is about to begin; collective every so many steps."""
        self._steps_since += num
        return self.agree() if self._steps_since >= self._pause else Agreed(False, False)

    def agree(self) -> Agreed:
        """Agrees now; collective."""
        now = self._clock()
        is_due = 0 < self._every_s <= now - self._saved_s
        rate = self._steps_since / max(now - self._agreed_s, 1e-9)
        pause = min(max(round(rate * PERIOD_S), 1), MAX_GROWTH * self._pause)
        first = self._comm.rank == 0  # the others add nothing but their signals
        summand = np.array([is_due * first, self._is_signalled(), pause * first], np.int64)
        is_due_at_first, num_signalled, self._pause = self._comm.allreduce_sum(summand).tolist()
        self._agreed_s, self._steps_since = now, 0
        return Agreed(bool(is_due_at_first), bool(num_signalled))

    def saved(self) -> None:
        """Counts the time to the next checkpoint from now."""
        self._saved_s = self._clock()
