"""Horovod's timeline of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ParameterError
from candle_p1.instrument.clock import ClockAnchor, read_anchor

if TYPE_CHECKING:
    from candle_p1.distributed.comm import Communicator

TIMELINE_VARIABLE = "HOROVOD_TIMELINE"


@dataclass(frozen=True)
class Timeline:
    """A timeline that Horovod writes.

    Attributes:
        path: The file, which rank 0 writes.
        anchor: Relates the timeline's clock to that of this process.
    """

    path: Path
    anchor: ClockAnchor = field(default_factory=read_anchor)

    def describe(self, start_s: float) -> dict[str, Any]:
        """Returns the record's section "timeline".

        Args:
            start_s: When the run began, by time.perf_counter.
        """
        return {
            "file": str(self.path),
            "anchor_epoch_us": self.anchor.epoch_us,
            "anchor_s": self.anchor.perf_counter_s - start_s,
        }


def open_timeline(name: str | None, comm: Communicator) -> Timeline | None:
    """Returns the timeline for a file; None for None.

    Raises:
        ParameterError: The file cannot be written, or there is only one rank.
    """
    if name is None:
        return None
    if comm.size == 1:
        raise ParameterError(
            f"timeline {name}: Horovod writes a timeline only if there are several ranks: start"
            " some, for example with candle-p1 run --np 2"
        )
    path = Path(name).expanduser().absolute()
    if comm.rank == 0:
        try:
            path.write_bytes(b"")
        except OSError as error:
            raise ParameterError(f"timeline {name}: {error.strerror}") from error
    return Timeline(path)


def is_traced() -> bool:
    """Returns whether Horovod traces this job, because of --timeline or its own variable."""
    return bool(os.environ.get(TIMELINE_VARIABLE))
