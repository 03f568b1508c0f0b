"""Horovod's operations."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from candle_p1.distributed.engines.engine import HOROVOD
from candle_p1.distributed.transports.graph import GraphTransport
from candle_p1.distributed.transports.transport import (
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_OF_16,
    BROADCAST,
    REDUCE_SCATTER,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.distributed.engines.horovod import HorovodEngine

FUSION, CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"


class HorovodTransport(GraphTransport):
    """Calls Horovod as a run does, with its settings."""

    operations: Sequence[str] = (ALLREDUCE, ALLREDUCE_OF_16, BROADCAST, ALLGATHER, REDUCE_SCATTER)
    own: Mapping[str, str] = {}
    """Horovod's variables that it sets, in ms and bytes; others are as a run has them."""

    def start(self) -> dict[str, Any]:
        """Starts Horovod with its settings."""
        os.environ.update(self.own)
        return super().start()

    def _start(self, engine: HorovodEngine) -> dict[str, Any]:
        settings: dict[str, Any] = engine.start(averaging=HOROVOD)["settings"]
        import horovod.tensorflow as hvd
        import tensorflow as tf

        self._hvd = hvd
        return {"library": f"Horovod {version('horovod')}, TensorFlow {tf.__version__}", **settings}

    def stop(self) -> None:
        """Shuts Horovod down: its thread would disturb what is measured next."""
        self._hvd.shutdown()

    def _operate(self, operation: str, tensor: Any, name: str, after: list[Any]) -> Any:
        hvd = self._hvd
        if operation == BROADCAST:
            return hvd.broadcast(tensor, root_rank=0, name=name)
        if operation == ALLGATHER:
            return hvd.allgather(tensor, name=name)
        if operation == REDUCE_SCATTER:
            return hvd.reducescatter(tensor, op=hvd.Sum, name=name)
        return hvd.allreduce(tensor, op=hvd.Average, name=name)


class FusingHorovod(HorovodTransport):
    """Calls Horovod with the settings that it has by itself."""

    operations = (ALLREDUCE, ALLREDUCE_OF_16)
    own: Mapping[str, str] = {FUSION: str(128 << 20), CYCLE: "1"}


class PapersHorovod(HorovodTransport):
    """Calls Horovod with the settings that it had by itself when the paper was written."""

    operations = (ALLREDUCE, ALLREDUCE_OF_16)
    own: Mapping[str, str] = {FUSION: str(64 << 20), CYCLE: "5"}
