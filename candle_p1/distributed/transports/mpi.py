"""MPI on buffers, without Python objects: what candle_p1.distributed.comm sends arrays with."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed.mpi_library import describe_version
from candle_p1.distributed.transports.transport import (
    ALLGATHER,
    ALLREDUCE,
    BROADCAST,
    ON_NODE,
    POINT_TO_POINT,
    REDUCE_SCATTER,
    STREAM,
    Call,
    Overlap,
    Transport,
    multiplier,
    places,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.distributed.transports.transport import Floats

WINDOW_BYTES = 1 << 22
MAX_WINDOW, MIN_WINDOW = 64, 4
"""Messages of a STREAM that are under way at a time: 64 as in osu_bw, fewer if they are large."""


class MpiTransport(Transport):
    """Calls MPI with numpy's arrays."""

    operations: Sequence[str] = (
        ALLREDUCE,
        BROADCAST,
        ALLGATHER,
        REDUCE_SCATTER,
        POINT_TO_POINT,
        ON_NODE,
        STREAM,
    )

    def start(self) -> dict[str, Any]:
        """Duplicates the communicator, so that no other message is in the way; collective."""
        from mpi4py import MPI

        self._mpi = MPI
        self._ranks = MPI.COMM_WORLD.Dup()
        self._places = places(self.comm)
        if ON_NODE not in self._places:
            self.operations = tuple(name for name in type(self).operations if name != ON_NODE)
        return {"library": describe_version(MPI.Get_library_version())}

    def stop(self) -> None:
        """Frees the communicator."""
        self._ranks.Free()

    def prepare(self, operation: str, values: Floats) -> Call:
        """Returns a call; buffers are allocated once, as Open MPI's own cache assumes."""
        prepare: dict[str, Callable[[Floats], Call]] = {
            ALLREDUCE: self._allreduce,
            BROADCAST: self._broadcast,
            ALLGATHER: self._allgather,
            REDUCE_SCATTER: self._reduce_scatter,
            STREAM: self._stream,
        }
        if operation in (POINT_TO_POINT, ON_NODE):
            return self._ping_pong(values, *self._places[operation])
        return prepare[operation](values)

    def overlap(self, values: Floats) -> Overlap:
        """Returns MPI_Iallreduce, products, and MPI_Wait, as in osu_iallreduce."""
        into, compute = np.empty_like(values), multiplier()

        def together(num_products: int) -> None:
            request = self._ranks.Iallreduce(values, into, op=self._mpi.SUM)
            compute(num_products)
            request.Wait()

        return Overlap(compute, together)

    def _allreduce(self, values: Floats) -> Call:
        into = np.empty_like(values)
        return Call(lambda: self._ranks.Allreduce(values, into, op=self._mpi.SUM), lambda: into)

    def _broadcast(self, values: Floats) -> Call:
        # The root goes round, as in Intel's MPI benchmarks: a root that is always the same would
        # run ahead of the others.
        roots = cycle(range(self.comm.size))
        return Call(lambda: self._ranks.Bcast(values, root=next(roots)), lambda: values)

    def _allgather(self, values: Floats) -> Call:
        into = np.empty(len(values) * self.comm.size, values.dtype)
        return Call(lambda: self._ranks.Allgather(values, into), lambda: into)

    def _reduce_scatter(self, values: Floats) -> Call:
        into = np.empty(len(values) // self.comm.size, values.dtype)
        return Call(
            lambda: self._ranks.Reduce_scatter_block(values, into, op=self._mpi.SUM),
            lambda: into,
        )

    def _ping_pong(self, values: Floats, first: int, second: int) -> Call:
        into, ranks = np.empty_like(values), self._ranks

        def ping() -> None:
            ranks.Send(values, second)
            ranks.Recv(into, second)

        def pong() -> None:
            ranks.Recv(into, first)
            ranks.Send(into, first)

        # The second rank's last message may still be on its way when it has sent it.
        if self.comm.rank == first:
            return Call(ping, lambda: into, first, num_messages=2)
        if self.comm.rank == second:
            return Call(pong, lambda: into, first, num_messages=2, is_timed=False)
        return Call(lambda: None, lambda: None, num_messages=2, is_timed=False)

    def _stream(self, values: Floats) -> Call:
        first, second = self._places[STREAM]
        window = min(MAX_WINDOW, max(MIN_WINDOW, WINDOW_BYTES // values.nbytes))
        into, answer, ranks = np.empty_like(values), np.empty(1, np.float32), self._ranks

        def send() -> None:
            requests = [ranks.Isend(values, second) for _ in range(window)]
            self._mpi.Request.Waitall(requests)
            ranks.Recv(answer, second)

        def receive() -> None:
            for _ in range(window):
                ranks.Recv(into, first)
            ranks.Send(answer, first)

        if self.comm.rank == first:
            return Call(send, lambda: None, num_messages=window)
        if self.comm.rank == second:
            return Call(receive, lambda: into, first, num_messages=window, is_timed=False)
        return Call(lambda: None, lambda: None, num_messages=window, is_timed=False)
