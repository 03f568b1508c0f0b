"""When gradients are ready to be averaged over the ranks, and when their averages are available.

Reading the clock takes a few microseconds per step and waits for nothing. It gives

- the time of each allreduce, from the gradient being ready to the average being available; this
  includes waiting for its turn and for other ranks;
- the *exposed* communication of each step: from the last gradient being ready, which is the end of
  back-propagation, to the last average being available. Back-propagation hides the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.instrument import phases

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from candle_p1.distributed.comm import Communicator
    from candle_p1.instrument.collectives import CommunicationLog
    from candle_p1.records.types import ClockWaitsFor

CAPACITY = 256
"""The number of steps that are kept before they are read."""
NOT_LOGGED = "gradient allreduces are not logged with --communication_log False"
NOT_TIMED = (
    "the engine {} does not time gradient allreduces here: on GPUs that would delay them, and older"
    " releases of its framework tell wrong times"
)


class AllreduceLog(ABC):
    """The allreduces of one model's gradients, as seen by one rank.

    Args:
        log: Where the allreduces are added up.

    Attributes:
        waits_for: What the clock waits for: "tensor", or "element" on a GPU; None before the step
            has been made.
    """

    library: str
    """What performs them."""

    def __init__(self, log: CommunicationLog) -> None:
        self._log = log
        self._num_unread = 0
        self._exposed_s = self._allreduce_s = 0.0
        self.waits_for: ClockWaitsFor | None = None

    def count_step(self) -> None:
        """Counts a step that begins, and reads the table before it overflows."""
        self._num_unread += 1
        if self._num_unread > CAPACITY:
            self._read()

    def take(self) -> tuple[float, float]:
        """Returns the exposed time, and the time in which any allreduce was in progress, in s.

        Both cover the steps since the last call.
        """
        self._read()
        taken = self._exposed_s, self._allreduce_s
        self._exposed_s = self._allreduce_s = 0.0
        return taken

    @abstractmethod
    def example(self, num_gradients: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Returns two functions: a step that does nothing but log, and one that does nothing.

        Their difference in time is what logging adds to a step with this number of gradients.
        """

    @abstractmethod
    def _take_rows(self) -> tuple[dict[str, int], NDArray[np.float64]]:
        """Returns what the steps since the last call have exchanged.

        Returns:
            The bytes that this rank has sent in every step, by the name of what was exchanged; and
            when each was ready and when its average was available, in s, with the shape (steps, 2,
            names). There may be no names before the first step.
        """

    def _read(self) -> None:
        sizes, rows = self._take_rows()
        self._num_unread = 0
        if not sizes:
            return
        seconds = (rows[:, 1] - rows[:, 0]).sum(axis=0)
        for (name, num_bytes), total_s in zip(sizes.items(), seconds, strict=True):
            self._log.add(self.library, f"allreduce {name}", num_bytes, float(total_s), len(rows))
        exposed_s = float(self._exposed(rows).sum())
        phases.add_communication(exposed_s)
        self._exposed_s += exposed_s
        self._allreduce_s += float(union_s(rows).sum())

    def _exposed(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the exposed time of each step, in s."""
        last_ready, last_done = rows[:, 0].max(axis=1), rows[:, 1].max(axis=1)
        return np.asarray(np.maximum(last_done - last_ready, 0.0))


def allreduce_times(
    log: AllreduceLog | None, comm: Communicator
) -> Callable[[], tuple[float | None, float | None]]:
    """Returns `AllreduceLog.take`; without a log, a function that returns 0 or None for both."""
    if log is not None:
        return log.take
    nothing = 0.0 if comm.size == 1 else None
    return lambda: (nothing, nothing)


def unknown_efficiency(
    log: AllreduceLog | None, comm: Communicator, engine: str, *, is_wanted: bool
) -> dict[str, Any]:
    """Returns the record's section "efficiency" if allreduces were not logged, else nothing.

    Args:
        log: The log, if there is one.
        comm: The ranks.
        engine: The name of the engine.
        is_wanted: Whether there was to be a log.
    """
    if log is None and comm.size > 1:
        reason = NOT_TIMED.format(engine) if is_wanted else NOT_LOGGED
        return {"efficiency": {"kind": "absent", "reason": reason}}
    return {}


def union_s(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the length of the union of the intervals in each row.

    Args:
        rows: The beginnings and ends, shape (rows, 2, intervals).
    """
    order = np.argsort(rows[:, 0], axis=1)
    begins = np.take_along_axis(rows[:, 0], order, axis=1)
    ends = np.take_along_axis(rows[:, 1], order, axis=1)
    covered_to = np.maximum.accumulate(ends, axis=1)
    before = np.concatenate([begins[:, :1], covered_to[:, :-1]], axis=1)
    covered = np.maximum(covered_to - np.maximum(begins, before), 0)
    return np.asarray(covered.sum(axis=1))
