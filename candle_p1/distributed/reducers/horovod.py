"""Averages by Horovod's operations in TensorFlow's graph, and Horovod's timeline of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from candle_p1.distributed.comm import Communicator, agree
from candle_p1.distributed.mpi_library import check_thread_level
from candle_p1.distributed.reducers.reducer import GraphReducer, average_as_half
from candle_p1.errors import ParameterError, SetupError
from candle_p1.instrument.phases import ClockAnchor, read_anchor

HOROVOD_DEFAULTS = {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": "134217728"}
"""The defaults of Horovod 0.28, in ms and bytes; when the paper was written: 5 and 67108864."""
TIMELINE_VARIABLE = "HOROVOD_TIMELINE"


class HorovodReducer(GraphReducer):
    """Averages each gradient by an operation of Horovod, which it starts. Making it is collective.

    Raises:
        SetupError: Horovod is missing, was built without MPI, or does not see the ranks of the job;
            MPI must not be called from several threads. The same on every rank.
    """

    name = "horovod"

    def __init__(self, comm: Communicator, compression: str = "none") -> None:
        super().__init__(comm, compression)
        self._hvd = hvd = agree(comm, import_horovod)
        check_thread_level(comm)
        hvd.init()
        _variables()
        why = "they use different MPI libraries. Rebuild one of them; candle-p1 doctor shows both"
        agree(comm, self.check_rank, hvd.rank(), hvd.size(), why)

    @property
    def settings(self) -> dict[str, str]:
        """The variables of Horovod that have an effect."""
        return HOROVOD_DEFAULTS | _variables()

    def average(self, gradients: Mapping[str, Any], after: Sequence[Any] = ()) -> list[Any]:
        """Returns the averages, of which each is computed as soon as its gradient is there."""
        hvd = self._hvd

        def average(gradient: Any, name: str) -> Any:
            if self.compression == "none":
                return hvd.allreduce(gradient, op=hvd.Average, name=name)
            return average_as_half(
                gradient,
                self.comm.size,
                lambda largest: hvd.allreduce(largest, op=hvd.Max, name=f"largest.{name}"),
                lambda values: hvd.allreduce(values, op=hvd.Sum, name=name),
            )

        return [average(gradient, name) for name, gradient in gradients.items()]

    def broadcast_tensor(self, value: Any, name: str, root: int) -> Any:
        return self._hvd.broadcast(value, root_rank=root, name=name)


@cache
def _variables() -> dict[str, str]:
    """Returns Horovod's variables as they are at the first call, after which it ignores changes."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("HOROVOD_")}


def import_horovod() -> Any:
    """Returns Horovod's module for TensorFlow; SetupError if it is missing, or lacks MPI."""
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # of any type, if Horovod was built for another TensorFlow
        raise SetupError(
            f"more than one rank needs Horovod, which cannot be imported: {error}. Install"
            " candle-p1[cpu] or candle-p1[gpu]"
        ) from error
    if not hvd.mpi_built():
        raise SetupError("Horovod was built without MPI: rebuild it with HOROVOD_WITH_MPI=1")
    return hvd


@dataclass(frozen=True)
class Timeline:
    """A timeline that Horovod writes on rank 0, and what relates its clock to this process's."""

    path: Path
    anchor: ClockAnchor = field(default_factory=read_anchor)

    def describe(self, start_s: float) -> dict[str, Any]:
        """Returns the record's section "timeline"; the run began at `start_s`, a perf_counter."""
        return {
            "file": str(self.path),
            "anchor_epoch_us": self.anchor.epoch_us,
            "anchor_s": self.anchor.perf_counter_s - start_s,
        }


def open_timeline(name: str | None, comm: Communicator) -> Timeline | None:
    """Returns the timeline for a file; None for None.

    Raises ParameterError if the file cannot be written, or there is only one rank.
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
