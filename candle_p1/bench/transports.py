"""Transports: the libraries through which ranks exchange arrays, and their operations.

Sizes and bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there): the size of an
allgather or a reduce-scatter is that of the whole array, of which each rank has one part. The
algorithm bandwidth is this size divided by the time. The bus bandwidth is the algorithm bandwidth
times a factor of the operation and the number of ranks, with which it becomes the rate of the
slowest link of a ring, whatever the number of ranks. OSU's benchmarks name the same times by
the size of one rank's part.

A transport is a class and an entry of TRANSPORTS.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count, cycle
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.distributed import devices
from candle_p1.distributed.backend import choose_backend
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.distributed.engine import HOROVOD, JAX, Engine
from candle_p1.distributed.mpi_library import describe_version
from candle_p1.distributed.reducers.horovod import HOROVOD_DEFAULTS
from candle_p1.distributed.reducers.jax import AXIS
from candle_p1.distributed.reducers.shared_memory import SharedMemoryReducer

Floats = NDArray[np.float32]
Overlap = tuple[Callable[[int], Any], Callable[[int], Any]]
"""Two functions: one computes so many products of matrices, one after the other; the other does the
same beside an allreduce, which begins before it."""

ALLREDUCE, ALLREDUCE_OF_16 = "allreduce", "allreduce_of_16"
BROADCAST, ALLGATHER, REDUCE_SCATTER = "broadcast", "allgather", "reduce_scatter"
POINT_TO_POINT, ON_NODE, STREAM = "point_to_point", "point_to_point_on_node", "stream"
NUM_TENSORS = 16
"""Of an ALLREDUCE_OF_16, which are handed over at once as the gradients of a step are: fusion and
cycle time make a difference only where there are several."""
ELEMENT_BYTES = 4
ONES, MEAN = np.ones((128, 128), np.float32), np.full((128, 128), 1 / 128, np.float32)
"""What is multiplied with each other: the products are ONES again."""
TIMEOUT_S = 300
"""How long ranks wait for one of them before an operation on shared memory ends with an error."""


class Operation(NamedTuple):
    """An operation between ranks.

    A ring passes (n - 1) / n of the array `passes` times; with 0 it goes from rank to rank. Several
    tensors may together be the array; one that `is_divided` has a part for each rank.
    """

    title: str
    passes: int = 0
    explanation: str = ""
    is_divided: bool = False
    num_tensors: int = 1

    def bus_factor(self, num_ranks: int) -> float:
        """Returns the bus bandwidth divided by the algorithm bandwidth."""
        return self.passes * (num_ranks - 1) / num_ranks if self.passes else 1.0

    def num_elements(self, num_bytes: int, num_ranks: int) -> int:
        """Returns how many elements an array of about so many bytes has."""
        least = num_ranks if self.is_divided else self.num_tensors
        num = max(least, -(-num_bytes // ELEMENT_BYTES))
        return -(-num // least) * least if self.is_divided else num


OF_16 = "together they have this size"
HALF = "half of a round trip between"
OPERATIONS = {
    ALLREDUCE: Operation("allreduce", 2),
    ALLREDUCE_OF_16: Operation("allreduce of 16 tensors", 2, OF_16, num_tensors=NUM_TENSORS),
    BROADCAST: Operation("broadcast"),
    ALLGATHER: Operation("allgather", 1, is_divided=True),
    REDUCE_SCATTER: Operation("reduce-scatter", 1, is_divided=True),
    POINT_TO_POINT: Operation("point to point", 0, f"{HALF} the first and the last rank"),
    ON_NODE: Operation("point to point on a node", 0, f"{HALF} two ranks of a node"),
    STREAM: Operation(
        "stream of messages", 0, "from the first to the last rank; times are per message"
    ),
}
"""The operations by name, in the order in which they are measured."""
OF_ENGINES = (ALLREDUCE, ALLREDUCE_OF_16, BROADCAST, ALLGATHER, REDUCE_SCATTER)


class Call(NamedTuple):
    """An operation on an array, ready to be timed; all ranks call it the same number of times.

    `run` does it once, with so many messages, and returns when this rank's part is complete;
    `received` returns what it has received, of `source` where it is that of one rank. Between two
    ranks the times of the first one count, as with OSU's benchmarks.
    """

    run: Callable[[], Any]
    received: Callable[[], NDArray[Any] | None] = lambda: None
    source: int = 0
    num_messages: int = 1
    is_timed: bool = True


class Transport(ABC):
    """A library that transfers arrays between ranks, at least two; all must call its methods.

    It offers the operations that training uses it for; an allreduce may return the mean instead of
    the sum. Its environment variables are set before the library starts.
    """

    name: ClassVar[str]
    what: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    operations: Sequence[str] = OF_ENGINES
    averages: ClassVar[bool] = True
    variables: ClassVar[Mapping[str, str]] = {}
    on_one_node: ClassVar[bool] = False

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    @classmethod
    def missing(cls) -> list[str]:
        """Returns the packages that it needs and that are not installed."""
        return [package for package in cls.packages if find_spec(package) is None]

    @abstractmethod
    def start(self) -> dict[str, Any]:
        """Starts it; returns its settings and version, or raises CandleError on every rank."""

    def stop(self) -> None:  # noqa: B027
        """Stops it, so that another one is measured alone."""

    @abstractmethod
    def prepare(self, operation: str, values: Floats) -> Call:
        """Returns a call of an operation on this rank's array: for ALLGATHER, on its part."""

    @abstractmethod
    def overlap(self, values: Floats) -> Overlap:
        """Returns an allreduce of an array beside computing that does not depend on it."""


class Mpi(Transport):
    """Calls MPI with numpy's arrays, as candle_p1.distributed.comm does."""

    name = "mpi"
    what = "MPI on buffers, as the data of loading and all small messages go"
    packages = ("mpi4py",)
    operations: Sequence[str] = tuple(name for name in OPERATIONS if name != ALLREDUCE_OF_16)
    averages = False

    def start(self) -> dict[str, Any]:
        """Duplicates the communicator, so that no other message is in the way; collective."""
        from mpi4py import MPI

        self._mpi, self._ranks = MPI, MPI.COMM_WORLD.Dup()
        self._places = places(self.comm)
        if ON_NODE not in self._places:
            self.operations = tuple(name for name in self.operations if name != ON_NODE)
        return {"library": describe_version(MPI.Get_library_version())}

    def stop(self) -> None:
        self._ranks.Free()

    def prepare(self, operation: str, values: Floats) -> Call:
        """Returns a call; buffers are allocated once, as Open MPI's own cache assumes."""
        if operation in self._places:
            return self._between(operation, values)
        ranks, num_ranks, total = self._ranks, self.comm.size, self._mpi.SUM
        if operation == BROADCAST:
            # The root goes round, as in Intel's MPI benchmarks: a root that is always the same
            # would run ahead of the others.
            roots = cycle(range(num_ranks))
            return Call(lambda: ranks.Bcast(values, root=next(roots)), lambda: values)
        length = {ALLGATHER: len(values) * num_ranks, REDUCE_SCATTER: len(values) // num_ranks}
        into = np.empty(length.get(operation, len(values)), values.dtype)
        run = {
            ALLREDUCE: lambda: ranks.Allreduce(values, into, op=total),
            ALLGATHER: lambda: ranks.Allgather(values, into),
            REDUCE_SCATTER: lambda: ranks.Reduce_scatter_block(values, into, op=total),
        }[operation]
        return Call(run, lambda: into)

    def overlap(self, values: Floats) -> Overlap:
        """Returns MPI_Iallreduce, products, and MPI_Wait, as in osu_iallreduce.

        A product has the operations of ONES times MEAN, but is a stack of products so small that
        no library of linear algebra divides them among threads.
        """
        received = np.empty_like(values)
        left, mean = np.ones((64, 32, 32), np.float32), np.full((32, 32), 1 / 32, np.float32)
        into = np.empty_like(left)

        def compute(num_products: int) -> None:
            for _ in range(num_products):
                np.matmul(left, mean, out=into)

        def together(num_products: int) -> None:
            request = self._ranks.Iallreduce(values, received, op=self._mpi.SUM)
            compute(num_products)
            request.Wait()

        return compute, together

    def _between(self, operation: str, values: Floats) -> Call:
        (first, second), ranks, mine = self._places[operation], self._ranks, self.comm.rank
        into, answer = np.empty_like(values), np.empty(1, np.float32)
        window = min(64, max(4, (1 << 22) // values.nbytes))  # as in osu_bw, or 4 MiB

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
        runs = {first: send, second: receive} if is_stream else {first: ping, second: pong}
        receives = mine == second or (mine == first and not is_stream)
        # The second rank's last message may still be on its way when it has sent it.
        return Call(
            runs.get(mine, lambda: None),
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


class EngineTransport(Transport):
    """The library of an engine, on the device that a run has."""

    engine: ClassVar[str]

    def start(self) -> dict[str, Any]:
        """Limits the backend to this rank's device, and starts what operates, as a run does."""
        os.environ.update(self.variables)
        engine = Engine(self.engine, self.comm, agree(self.comm, choose_backend, self.engine))
        device = devices.configure(self.comm, engine)
        self._is_gpu = device.is_gpu
        return {"device": device.name, "threads": device.threads, **self.start_engine(engine)}

    @abstractmethod
    def start_engine(self, engine: Any) -> dict[str, Any]:
        """Starts what operates; returns its settings and version."""

    def _split(self, operation: str, values: Floats) -> list[Floats]:
        return np.array_split(values, NUM_TENSORS) if operation == ALLREDUCE_OF_16 else [values]


class Horovod(EngineTransport):
    """Calls compiled functions of TensorFlow that have one of Horovod's operations alone."""

    name = "horovod"
    what = (
        "Horovod as a run sets it: no fusion, cycle time 1 ms, unless its variables say otherwise"
    )
    packages: ClassVar[tuple[str, ...]] = ("mpi4py", "tensorflow", "horovod")
    engine = HOROVOD
    _names = count()

    def start_engine(self, engine: Any) -> dict[str, Any]:
        settings: dict[str, Any] = engine.start(averaging=HOROVOD)["settings"]
        import horovod.tensorflow as hvd
        import tensorflow as tf

        self._hvd = hvd
        return {"library": f"Horovod {version('horovod')}, TensorFlow {tf.__version__}", **settings}

    def stop(self) -> None:
        """Shuts Horovod down: its thread would disturb what is measured next."""
        self._hvd.shutdown()

    def operate(self, operation: str, tensor: Any, name: str, after: Sequence[Any] = ()) -> Any:
        """Returns the result of an operation in a graph, after another result if there is one."""
        hvd = self._hvd
        call = {
            BROADCAST: partial(hvd.broadcast, root_rank=0),
            ALLGATHER: hvd.allgather,
            REDUCE_SCATTER: partial(hvd.reducescatter, op=hvd.Sum),
        }.get(operation, partial(hvd.allreduce, op=hvd.Average))
        return call(tensor, name=name)

    def prepare(self, operation: str, values: Floats) -> Call:
        import tensorflow as tf

        tensors = [tf.constant(part) for part in self._split(operation, values)]
        names = [f"{operation}.{next(self._names)}" for _ in tensors]

        def operate_all() -> list[Any]:
            results: list[Any] = []
            for tensor, name in zip(tensors, names, strict=True):
                results.append(self.operate(operation, tensor, name, results[-1:]))
            return results

        call: Any = tf.function(operate_all)
        last: list[Any] = []

        def run() -> None:
            last[:] = call()
            self._await(last)

        return Call(run, lambda: np.concatenate([np.asarray(each) for each in last]))

    def overlap(self, values: Floats) -> Overlap:
        """Returns a graph of both: so are gradients averaged while back-propagation goes on."""
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
            return [self.operate(ALLREDUCE, tensor, name), products(num_products)]

        alone, together = tf.function(products), tf.function(both)
        return (
            lambda num: self._await([alone(tf.constant(num))]),
            lambda num: self._await(together(tf.constant(num))),
        )

    def _await(self, tensors: list[Any]) -> None:
        """Waits until tensors are there: on a GPU a function returns when its work is queued."""
        import tensorflow as tf

        if self._is_gpu:
            for tensor in tensors:
                tf.reshape(tensor, [-1])[0].numpy()


class HorovodFusion(Horovod):
    """Allreduces with Horovod's own settings."""

    name = "horovod_fusion"
    what = (
        "Horovod's own defaults, as with --deterministic False: fusion to 128 MiB, cycle time 1 ms"
    )
    operations = (ALLREDUCE, ALLREDUCE_OF_16)
    variables = HOROVOD_DEFAULTS


class HorovodPaper(HorovodFusion):
    """Allreduces with the settings that the paper had."""

    name = "horovod_paper"
    what = "Horovod's defaults when the paper was written: fusion to 64 MiB, cycle time 5 ms"
    variables: ClassVar = dict(zip(HOROVOD_DEFAULTS, ("5", str(64 << 20)), strict=True))


class SharedMemory(Horovod):
    """Averages as a run on one node does; an optimizer that updates meanwhile is left out."""

    name = "shared_memory"
    what = (
        "memory that the ranks of a node share, as gradients are averaged on the CPUs of one node"
    )
    packages = ("mpi4py", "tensorflow")
    operations = (ALLREDUCE, ALLREDUCE_OF_16, BROADCAST)
    on_one_node = True

    def start_engine(self, engine: Any) -> dict[str, Any]:
        import tensorflow as tf

        self._reducer = SharedMemoryReducer(self.comm, TIMEOUT_S)
        return {"library": f"TensorFlow {tf.__version__}", "averaging": self._reducer.name}

    def stop(self) -> None:
        """Does nothing."""

    def operate(self, operation: str, tensor: Any, name: str, after: Sequence[Any] = ()) -> Any:
        if operation == BROADCAST:
            return self._reducer.broadcast_tensor(tensor, name, root=0)
        return self._reducer.average_tensor(tensor, name, after=after)


class Jax(EngineTransport):
    """Calls XLA's collectives on the devices of all ranks."""

    name = engine = JAX
    what = "XLA's collectives within a compiled program: Gloo on CPUs, NCCL or RCCL on GPUs"
    packages = ("mpi4py", "jax")

    def start_engine(self, engine: Any) -> dict[str, Any]:
        settings = engine.start()["settings"]
        self._mapped = engine.reducer.mapped
        import jax

        if not self._is_gpu:
            # Gloo's sometimes returns wrong values on rank 0: github.com/jax-ml/jax/issues/40830
            self.operations = tuple(each for each in self.operations if each != REDUCE_SCATTER)
        return {"library": f"JAX {jax.__version__}", **settings}

    def prepare(self, operation: str, values: Floats) -> Call:
        """Returns a call of a program that has the operation alone; it is compiled here."""
        import jax

        parts: list[Any] = list(self._split(operation, values))
        if operation == BROADCAST:  # as the engine does it: the others add zeros to the root's bits
            parts = [each.view(np.uint32) * np.uint32(self.comm.rank == 0) for each in parts]
        operate: Callable[[Any], Any] = {
            BROADCAST: lambda x: jax.lax.psum(x, AXIS),
            ALLGATHER: lambda x: jax.lax.all_gather(x, AXIS, tiled=True),
            REDUCE_SCATTER: lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True),
        }.get(operation, lambda x: jax.lax.pmean(x, AXIS))
        call = self._mapped(lambda arrays: [operate(each) for each in arrays], parts)
        last: list[Any] = []

        def run() -> None:
            last[:] = jax.block_until_ready(call())

        def received() -> Any:
            return np.concatenate([np.asarray(each) for each in last]).view(np.float32)

        return Call(run, received)

    def overlap(self, values: Floats) -> Overlap:
        import jax

        def products(num_products: Any) -> Any:
            return jax.lax.fori_loop(0, num_products, lambda i, x: x @ MEAN, ONES)

        def both(array: Any, num_products: Any) -> tuple[Any, Any]:
            return jax.lax.pmean(array, AXIS), products(num_products)

        alone, together = self._mapped(products), self._mapped(both, values)
        return (
            lambda num: jax.block_until_ready(alone(np.int32(num))),
            lambda num: jax.block_until_ready(together(np.int32(num))),
        )


TRANSPORTS: Mapping[str, type[Transport]] = {
    kind.name: kind for kind in (Mpi, SharedMemory, Horovod, HorovodFusion, HorovodPaper, Jax)
}
"""The transports by name, in the order in which they are measured."""
