"""Averages in the memory of the host, for ranks that share a GPU, where NCCL refuses to.

It is for tests of the path of several ranks: a step waits while all of its gradients go to the
host and, by MPI, through all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from candle_p1.distributed.comm import Communicator
from candle_p1.distributed.mpi_library import check_thread_level
from candle_p1.distributed.reducers.reducer import Reducer
from candle_p1.errors import SetupError
from candle_p1.instrument.collectives import note_collective


class HostReducer(Reducer):
    """Averages by a call of the host from JAX's compiled step. Making it is collective.

    The host is called in a thread of XLA's, so its messages have a communicator of their own.

    Raises:
        SetupError: They are on several nodes, or gradients are to be compressed; the same on every
            rank.
    """

    name = "host"

    def __init__(self, comm: Communicator, compression: str = "none") -> None:
        super().__init__(comm, compression)
        if comm.num_nodes > 1 or compression != "none":
            raise SetupError(
                "--share_gpus is for ranks of one node, without --compression"
            ).on_all_ranks()
        check_thread_level(comm)
        self._apart = comm.split_nodes(0).local

    @property
    def settings(self) -> dict[str, str]:
        return {"collectives": self.name}

    def average(self, gradients: Mapping[str, Any], after: Sequence[Any] = ()) -> list[Any]:
        """Returns the averages, within a step that JAX compiles."""
        import jax
        from jax.experimental import io_callback

        given = list(gradients.values())
        like = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in given]
        return list(io_callback(self._average, like, given, ordered=True))

    def _average(self, gradients: Sequence[Any]) -> list[Any]:
        averages = []
        for gradient in map(np.asarray, gradients):
            values = gradient.astype(np.result_type(gradient.dtype, np.float32))
            total = self._apart.allreduce_sum(values) / values.dtype.type(self.comm.size)
            averages.append(total.astype(gradient.dtype))
        return averages

    def broadcast(self, variables: Sequence[Any], root: int) -> None:
        num_bytes, begin = 0, time.perf_counter()
        for variable in variables:
            value = np.asarray(variable.value)
            variable.assign(self.comm.broadcast(value, root))
            num_bytes += value.nbytes * (self.comm.rank == root)
        note_collective(self.name, "broadcast", num_bytes, time.perf_counter() - begin)
