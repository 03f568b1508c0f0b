"""Memory that the ranks of a node share, through which runs on its CPUs average."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.distributed.engines.horovod import SHARED_MEMORY
from candle_p1.distributed.node_memory import NodeMemory
from candle_p1.distributed.transports.graph import GraphTransport
from candle_p1.distributed.transports.transport import ALLREDUCE, ALLREDUCE_OF_16, BROADCAST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.distributed.engines.horovod import HorovodEngine

PATIENCE_S = 300
"""How long ranks wait for one of them before an operation ends with an error."""


class SharedMemoryTransport(GraphTransport):
    """Averages as a run on one node does; an optimizer that updates meanwhile is left out."""

    operations: Sequence[str] = (ALLREDUCE, ALLREDUCE_OF_16, BROADCAST)

    def _start(self, engine: HorovodEngine) -> dict[str, Any]:
        import tensorflow as tf

        self._memory = NodeMemory(self.comm, PATIENCE_S)
        return {"library": f"TensorFlow {tf.__version__}", "averaging": SHARED_MEMORY}

    def _operate(self, operation: str, tensor: Any, name: str, after: list[Any]) -> Any:
        if operation == BROADCAST:
            return self._memory.broadcast(tensor, name, root=0, after=after)
        return self._memory.average(tensor, name, after=after)
