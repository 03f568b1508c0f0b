"""The engine of a single process: nothing is averaged, whatever Keras's backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.distributed.backend import AUTO
from candle_p1.distributed.engines.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from candle_p1.distributed.allreduce_log import AllreduceLog


class SerialEngine(Engine):
    """Trains in one process, and needs neither Horovod nor MPI."""

    name = "serial"

    def start(
        self,
        *,
        stall_shutdown_s: int = 300,
        deterministic: bool = True,
        timeline: Path | None = None,
        averaging: str = AUTO,
    ) -> dict[str, Any]:
        """Starts nothing."""
        return {"backend": self.name}

    def uses_xla(self, *, is_gpu: bool) -> bool:
        """Returns whether Keras compiles with XLA; on a CPU, TensorFlow is faster without it."""
        return is_gpu or super().uses_xla(is_gpu=is_gpu)

    def average(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        compression: str = "none",
        log: AllreduceLog | None = None,
    ) -> list[Any]:
        """Returns the gradients."""
        return list(gradients)

    def broadcast_state(self, model: Any, root: int = 0) -> None:
        """Does nothing."""
