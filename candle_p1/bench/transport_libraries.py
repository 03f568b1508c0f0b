"""The calls that exchange arrays: of MPI, shared memory, Horovod and XLA."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import count, cycle
from typing import Any

import numpy as np

from candle_p1.bench.transports import (
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_OF_16,
    BROADCAST,
    NUM_TENSORS,
    ON_NODE,
    POINT_TO_POINT,
    PRODUCT_SIZE,
    REDUCE_SCATTER,
    SMALL_SIZE,
    STREAM,
    Call,
    Floats,
    Overlap,
    Transport,
)
from candle_p1.distributed import devices
from candle_p1.distributed.backend import choose_backend
from candle_p1.distributed.comm import Attempt, Communicator
from candle_p1.distributed.engines.engine import HOROVOD
from candle_p1.distributed.engines.horovod import SHARED_MEMORY, HorovodEngine
from candle_p1.distributed.engines.jax import AXIS, JaxEngine
from candle_p1.distributed.mpi_library import describe_version
from candle_p1.distributed.node_memory import NodeMemory

WINDOW_BYTES = 1 << 22
MAX_WINDOW, MIN_WINDOW = 64, 4
"""Messages of a STREAM that are under way at a time: 64 as in osu_bw, fewer if they are large."""
ONES = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
MEAN = ONES / np.float32(PRODUCT_SIZE)
"""What is multiplied with each other: the products are ONES again."""
PATIENCE_S = 300
"""How long ranks wait for one of them before an operation on shared memory ends with an error."""


class MpiTransport(Transport):
    """Calls MPI with numpy's arrays, as candle_p1.distributed.comm does."""

    operations: Sequence[str] = (
        ALLREDUCE,
        BROADCAST,
        ALLGATHER,
        REDUCE_SCATTER,
        POINT_TO_POINT,
        ON_NODE,
        STREAM,
    )
    averages = False

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
        self._ranks.Free()

    def prepare(self, operation: str, values: Floats) -> Call:
        """Returns a call; buffers are allocated once, as Open MPI's own cache assumes."""
        if operation in self._places:
            return self._between(operation, values)
        if operation == BROADCAST:
            # The root goes round, as in Intel's MPI benchmarks: a root that is always the same
            # would run ahead of the others.
            roots = cycle(range(self.comm.size))
            return Call(lambda: self._ranks.Bcast(values, root=next(roots)), lambda: values)
        num, ranks, total = len(values), self._ranks, self._mpi.SUM
        if operation == ALLGATHER:
            num *= self.comm.size
        elif operation == REDUCE_SCATTER:
            num //= self.comm.size
        into = np.empty(num, values.dtype)
        run = {
            ALLREDUCE: lambda: ranks.Allreduce(values, into, op=total),
            ALLGATHER: lambda: ranks.Allgather(values, into),
            REDUCE_SCATTER: lambda: ranks.Reduce_scatter_block(values, into, op=total),
        }[operation]
        return Call(run, lambda: into)

    def overlap(self, values: Floats) -> Overlap:
        """Returns MPI_Iallreduce, products, and MPI_Wait, as in osu_iallreduce."""
        into, compute = np.empty_like(values), multiplier()

        def together(num_products: int) -> None:
            request = self._ranks.Iallreduce(values, into, op=self._mpi.SUM)
            compute(num_products)
            request.Wait()

        return Overlap(compute, together)

    def _between(self, operation: str, values: Floats) -> Call:
        """Returns a round trip between two ranks, or a STREAM from one to the other."""
        (first, second), ranks, mine = self._places[operation], self._ranks, self.comm.rank
        into, answer = np.empty_like(values), np.empty(1, np.float32)
        window = min(MAX_WINDOW, max(MIN_WINDOW, WINDOW_BYTES // values.nbytes))

        def ping() -> None:
            ranks.Send(values, second)
            ranks.Recv(into, second)

        def pong() -> None:
            ranks.Recv(into, first)
            ranks.Send(into, first)

        def send() -> None:
            requests = [ranks.Isend(values, second) for _ in range(window)]
            self._mpi.Request.Waitall(requests)
            ranks.Recv(answer, second)

        def receive() -> None:
            for _ in range(window):
                ranks.Recv(into, first)
            ranks.Send(answer, first)

        is_stream = operation == STREAM
        both = (send, receive) if is_stream else (ping, pong)
        run = dict(zip((first, second), both, strict=True)).get(mine, lambda: None)
        receives = mine == second or (mine == first and not is_stream)
        # The second rank's last message may still be on its way when it has sent it.
        return Call(
            run,
            lambda: into if receives else None,
            first,
            num_messages=window if is_stream else 2,
            is_timed=mine == first,
        )


def places(comm: Communicator) -> Mapping[str, tuple[int, int]]:
    """Returns the two ranks of each operation from point to point; collective.

    There is ON_NODE only if there are several nodes, one of which has several ranks.
    """
    found = {POINT_TO_POINT: (0, comm.size - 1), STREAM: (0, comm.size - 1)}
    if comm.num_nodes > 1:
        seconds = comm.first(comm.rank if comm.local_rank == 1 else None)
        firsts = comm.collect(comm.node if comm.local_rank == 0 else None)
        if seconds:
            node = comm.broadcast(comm.node, seconds[0])
            first = next(rank for rank, of_node in firsts if of_node == node)
            found[ON_NODE] = (first, seconds[0])
    return found


def multiplier() -> Callable[[int], None]:
    """Returns a function that computes so many products of matrices in this thread, with numpy.

    Each has the operations of one of PRODUCT_SIZE, but is a stack of products so small that no
    library of linear algebra divides them among threads.
    """
    num, size = (PRODUCT_SIZE // SMALL_SIZE) ** 3, SMALL_SIZE
    left = np.ones((num, size, size), np.float32)
    mean, into = np.full((size, size), 1 / size, np.float32), np.empty_like(left)

    def compute(num_products: int) -> None:
        for _ in range(num_products):
            np.matmul(left, mean, out=into)

    return compute


def _split(operation: str, values: Floats) -> list[Floats]:
    return np.array_split(values, NUM_TENSORS) if operation == ALLREDUCE_OF_16 else [values]


class HorovodTransport(Transport):
    """Calls compiled functions of TensorFlow that have one of Horovod's operations alone.

    As in a run, or for allreduces with other settings.
    """

    operations: Sequence[str] = (ALLREDUCE, ALLREDUCE_OF_16, BROADCAST, ALLGATHER, REDUCE_SCATTER)

    def __init__(self, comm: Communicator, variables: Mapping[str, str]) -> None:
        super().__init__(comm, variables)
        self._names = count()
        if variables:
            self.operations = (ALLREDUCE, ALLREDUCE_OF_16)

    def start(self) -> dict[str, Any]:
        """Limits TensorFlow to this rank's device, and starts what operates, as a run does."""
        os.environ.update(self.variables)
        Attempt(lambda: choose_backend("horovod")).agree(self.comm)
        engine = HorovodEngine(self.comm, "tensorflow")
        device = devices.configure(self.comm, engine)
        self._is_gpu = device.is_gpu
        return {"device": device.name, "threads": device.threads} | self._start(engine)

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
        """Returns the result of an operation in a graph, after another result if there is one."""
        hvd = self._hvd
        if operation == BROADCAST:
            return hvd.broadcast(tensor, root_rank=0, name=name)
        if operation == ALLGATHER:
            return hvd.allgather(tensor, name=name)
        if operation == REDUCE_SCATTER:
            return hvd.reducescatter(tensor, op=hvd.Sum, name=name)
        return hvd.allreduce(tensor, op=hvd.Average, name=name)

    def prepare(self, operation: str, values: Floats) -> Call:
        import tensorflow as tf

        tensors = [tf.constant(part) for part in _split(operation, values)]
        names = [f"{operation}.{next(self._names)}" for _ in tensors]

        def operate_all() -> list[Any]:
            results: list[Any] = []
            for tensor, name in zip(tensors, names, strict=True):
                results.append(self._operate(operation, tensor, name, results[-1:]))
            return results

        call: Any = tf.function(operate_all)
        last: list[Any] = []

        def run() -> None:
            last[:] = call()
            self._await(last)

        return Call(run, lambda: np.concatenate([np.asarray(each) for each in last]))

    def overlap(self, values: Floats) -> Overlap:
        """Returns a graph of an allreduce and of products that do not depend on it.

        So are gradients averaged while back-propagation goes on.
        """
        import tensorflow as tf

        tensor, name = tf.constant(values), f"overlap.{next(self._names)}"
        ones, mean = tf.constant(ONES), tf.constant(MEAN)

        def products(num_products: Any) -> Any:
            return tf.while_loop(
                lambda i, x: i < num_products,
                lambda i, x: (i + 1, tf.matmul(x, mean)),
                (tf.constant(0), ones),
                parallel_iterations=1,
            )[1]

        def both(num_products: Any) -> list[Any]:
            return [self._operate(ALLREDUCE, tensor, name, []), products(num_products)]

        alone, together = tf.function(products), tf.function(both)
        return Overlap(
            lambda num: self._await([alone(tf.constant(num))]),
            lambda num: self._await(together(tf.constant(num))),
        )

    def _await(self, tensors: list[Any]) -> None:
        """Waits until tensors are there: on a GPU a function returns when its work is queued."""
        import tensorflow as tf

        if self._is_gpu:
            for tensor in tensors:
                tf.reshape(tensor, [-1])[0].numpy()


class SharedMemoryTransport(HorovodTransport):
    """Averages as a run on one node does; an optimizer that updates meanwhile is left out."""

    operations: Sequence[str] = (ALLREDUCE, ALLREDUCE_OF_16, BROADCAST)

    def _start(self, engine: HorovodEngine) -> dict[str, Any]:
        import tensorflow as tf

        self._memory = NodeMemory(self.comm, PATIENCE_S)
        return {"library": f"TensorFlow {tf.__version__}", "averaging": SHARED_MEMORY}

    def stop(self) -> None:
        """Does nothing."""

    def _operate(self, operation: str, tensor: Any, name: str, after: list[Any]) -> Any:
        if operation == BROADCAST:
            return self._memory.broadcast(tensor, name, root=0, after=after)
        return self._memory.average(tensor, name, after=after)


class JaxTransport(Transport):
    """Calls XLA's collectives on the devices of all ranks."""

    operations: Sequence[str] = (ALLREDUCE, ALLREDUCE_OF_16, BROADCAST, ALLGATHER, REDUCE_SCATTER)

    def start(self) -> dict[str, Any]:
        """Joins the ranks, as a run does."""
        Attempt(lambda: choose_backend("jax")).agree(self.comm)
        self._engine = JaxEngine(self.comm, "jax")
        device = devices.configure(self.comm, self._engine)
        settings = self._engine.start()["settings"]
        import jax

        if jax.default_backend() == "cpu":
            # Gloo's sometimes returns wrong values on rank 0: github.com/jax-ml/jax/issues/40830
            self.operations = tuple(each for each in self.operations if each != REDUCE_SCATTER)
        library = f"JAX {jax.__version__}"
        return {"library": library, "device": device.name, "threads": device.threads, **settings}

    def prepare(self, operation: str, values: Floats) -> Call:
        """Returns a call of a program that has the operation alone; it is compiled here."""
        import jax

        parts: list[Any] = list(_split(operation, values))
        if operation == BROADCAST:  # as the engine does it: the others add zeros to the root's bits
            parts = [each.view(np.uint32) * np.uint32(self.comm.rank == 0) for each in parts]
        operate: Callable[[Any], Any] = {
            BROADCAST: lambda x: jax.lax.psum(x, AXIS),
            ALLGATHER: lambda x: jax.lax.all_gather(x, AXIS, tiled=True),
            REDUCE_SCATTER: lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True),
        }.get(operation, lambda x: jax.lax.pmean(x, AXIS))
        call = self._engine.prepared(lambda arrays: [operate(each) for each in arrays], parts)
        last: list[Any] = []

        def run() -> None:
            last[:] = jax.block_until_ready(call())

        def received() -> Any:
            return np.concatenate([np.asarray(each) for each in last]).view(np.float32)

        return Call(run, received)

    def overlap(self, values: Floats) -> Overlap:
        """Returns a program of an allreduce and of products that do not depend on it."""
        import jax

        def products(num_products: Any) -> Any:
            return jax.lax.fori_loop(0, num_products, lambda i, x: x @ MEAN, ONES)

        def both(array: Any, num_products: Any) -> tuple[Any, Any]:
            return jax.lax.pmean(array, AXIS), products(num_products)

        alone = self._engine.prepared(products)
        together = self._engine.prepared(both, values)
        return Overlap(
            lambda num: jax.block_until_ready(alone(np.int32(num))),
            lambda num: jax.block_until_ready(together(np.int32(num))),
        )
