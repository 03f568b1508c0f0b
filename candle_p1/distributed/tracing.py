"""What a run notes of the exchange between its ranks, beside the collectives of MPI."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.distributed.gradient_log import GradientLog
from candle_p1.distributed.horovod import TIMELINE_VARIABLE
from candle_p1.errors import ParameterError
from candle_p1.instrument.clock import ClockAnchor, read_anchor

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.devices import Device
    from candle_p1.instrument.collectives import CommunicationLog
    from candle_p1.parameters.parameter_set import ParameterSet

UNKNOWN = (
    "the exchange of gradients is not logged: it is where TensorFlow trains on CPUs, unless"
    " --communication_log False"
)


@dataclass(frozen=True)
class Timeline:
    """Horovod's timeline of a run.

    Attributes:
        path: The file, which rank 0 writes.
        anchor: Relates its clock to this program's.
    """

    path: Path
    anchor: ClockAnchor = field(default_factory=read_anchor)

    def describe(self, start_s: float) -> dict[str, Any]:
        """Returns what the record says of it.

        Args:
            start_s: When the run began, by time.perf_counter.
        """
        return {
            "file": str(self.path),
            "anchor_epoch_us": self.anchor.epoch_us,
            "anchor_s": self.anchor.perf_counter_s - start_s,
        }


def open_timeline(name: str | None, comm: Communicator) -> Timeline | None:
    """Returns the timeline that a run is to write; None is none.

    Raises:
        ParameterError: The file cannot be written, or there is nothing to trace.
    """
    if name is None:
        return None
    if comm.size == 1:
        raise ParameterError(
            f"timeline {name}: one rank exchanges nothing, so Horovod has no timeline: start"
            " several, as candle-p1 run --np 2 does"
        )
    path = Path(name).expanduser().absolute()
    if comm.rank == 0:
        try:
            path.write_bytes(b"")
        except OSError as error:
            raise ParameterError(f"timeline {name}: {error.strerror}") from error
    return Timeline(path)


def is_traced() -> bool:
    """Returns whether Horovod traces this job, by our flag or its own variable."""
    return bool(os.environ.get(TIMELINE_VARIABLE))


def log_gradients(
    log: CommunicationLog, params: ParameterSet, device: Device, comm: Communicator
) -> GradientLog | None:
    """Returns what notes the exchange of gradients; None where there is none, or it is not noted.

    On a GPU the operations that read the clock would tell when work was handed to the GPU.
    """
    if comm.size == 1 or device.is_gpu or not params["communication_log"]:
        return None
    return GradientLog(log)


def taking(
    gradients: GradientLog | None, comm: Communicator
) -> Callable[[], tuple[float | None, float | None]]:
    """Returns what gives exposed and whole time of the exchange since the last call."""
    if gradients is not None:
        return gradients.take
    nothing = 0.0 if comm.size == 1 else None
    return lambda: (nothing, nothing)


def unknown_efficiency(gradients: GradientLog | None, comm: Communicator) -> dict[str, Any]:
    """Returns the record's section of efficiency, where it cannot be told; else nothing."""
    if gradients is None and comm.size > 1:
        return {"efficiency": {"kind": "absent", "reason": UNKNOWN}}
    return {}
