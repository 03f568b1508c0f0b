"""Horovod on TensorFlow: the default, and the engine of the paper.

Horovod's own ``hvd.DistributedOptimizer`` overrides a method that Keras 3 never calls: it raises no
error and averages nothing. This engine uses Horovod's operations directly, in the one method that
every Keras 3 optimizer goes through, ``apply(gradients, variables)``.

Ranks that all train on the CPUs of one node average through memory that they share, which is faster
than MPI (docs/performance.md). Horovod is then started only if something needs it, because its
thread, which asks all ranks every millisecond what is ready, runs on the cores that compute.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from candle_p1.distributed.backend import AUTO
from candle_p1.distributed.comm import Attempt
from candle_p1.distributed.compression import LARGEST_BYTES, average_as_half
from candle_p1.distributed.engines.engine import Engine
from candle_p1.distributed.graph_log import GraphLog
from candle_p1.distributed.launch_environment import read_number
from candle_p1.distributed.mpi_library import check_thread_level
from candle_p1.distributed.node_memory import NodeMemory
from candle_p1.distributed.shared_file import NoRoomError
from candle_p1.distributed.timeline import TIMELINE_VARIABLE, is_traced
from candle_p1.errors import SetupError
from candle_p1.instrument.collectives import note_collective
from candle_p1.ops import read_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from candle_p1.distributed.allreduce_log import AllreduceLog
    from candle_p1.distributed.comm import Communicator
    from candle_p1.instrument.collectives import CommunicationLog
    from candle_p1.ops.updates import Update

STALL_CHECK_S = 60
_settings: dict[str, str] = {}
"""Horovod's variables when this process initialized it, which is when it reads them."""
STALL_VARIABLE = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
GIVE_STALL = "a whole number of seconds up to 1000000; 0 means no limit"
SHARED_MEMORY = "shared memory"
"""What averages gradients, unless Horovod does."""
HOROVOD_DEFAULTS = {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": "134217728"}
"""The defaults of Horovod 0.28, in ms and bytes; when the paper was written: 5 and 67108864."""


class HorovodEngine(Engine):
    """Averages gradients by Horovod's operations in TensorFlow's graph."""

    name = "horovod"

    def __init__(self, comm: Communicator, backend: str) -> None:
        super().__init__(comm, backend)
        self._memory: NodeMemory | None = None
        self._is_initialized = False

    def start(
        self,
        *,
        stall_shutdown_s: int = 300,
        deterministic: bool = True,
        timeline: Path | None = None,
        averaging: str = AUTO,
    ) -> dict[str, Any]:
        """Initializes Horovod, or what averages instead.

        Horovod's variables that are set in the environment take precedence.

        Raises:
            SetupError: Horovod is missing, was built without MPI, or does not see the ranks of the
                job; MPI must not be called from several threads.
        """
        stall_shutdown_s = Attempt(
            lambda: read_number(STALL_VARIABLE, stall_shutdown_s, GIVE_STALL, most=10**6)
        ).agree(self.comm)
        check = min(STALL_CHECK_S, stall_shutdown_s // 2) if stall_shutdown_s else STALL_CHECK_S
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(check, 1)))
        os.environ[STALL_VARIABLE] = str(stall_shutdown_s)
        if deterministic:
            # Timing decides which gradients are fused and thereby, from three ranks on, the order
            # in which MPI adds.
            os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
        if timeline is not None:
            os.environ[TIMELINE_VARIABLE] = str(timeline)
        if averaging == AUTO and self.comm.num_nodes == 1 and not (_has_gpu() or is_traced()):
            with suppress(NoRoomError):  # then Horovod averages, as the record says
                self._memory = NodeMemory(self.comm, stall_shutdown_s)
        facts = {"backend": self.name, "stall_shutdown_s": stall_shutdown_s}
        if self._memory is not None:
            return facts | {"settings": {"averaging": SHARED_MEMORY}}
        self._initialize()
        return facts | {"settings": {"averaging": self.name} | HOROVOD_DEFAULTS | _settings}

    def _initialize(self) -> Any:
        """Returns Horovod, which is initialized by the first call; collective."""
        if self._is_initialized:
            return _horovod()
        hvd = Attempt(_horovod).agree(self.comm)
        check_thread_level(self.comm)
        hvd.init()
        if not _settings:
            _settings.update(
                (name, value)
                for name, value in sorted(os.environ.items())
                if name.startswith("HOROVOD_")
            )
        comm = self.comm

        def compare() -> None:
            if (hvd.rank(), hvd.size()) != (comm.rank, comm.size):
                raise SetupError(
                    f"this is rank {hvd.rank()} of {hvd.size()} for Horovod and rank {comm.rank} of"
                    f" {comm.size} for mpi4py: they use different MPI libraries. Rebuild one of"
                    " them; candle-p1 doctor shows both"
                )

        Attempt(compare).agree(comm)
        self._is_initialized = True
        return hvd

    def uses_xla(self, *, is_gpu: bool) -> bool:
        """Returns False: XLA knows none of Horovod's operations (docs/performance.md)."""
        return False

    def make_log(self, log: CommunicationLog, *, is_gpu: bool) -> AllreduceLog:
        """Returns a log that the graph writes."""
        return GraphLog(log)

    def average(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        compression: str = "none",
        log: AllreduceLog | None = None,
    ) -> list[Any]:
        """Returns the averages over ranks; of sparse gradients (tf.IndexedSlices), dense ones."""
        given = _named(gradients, variables)
        on_gpu = [
            _is_on_gpu(variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]
        ready = list(map(_clock, given.values(), on_gpu)) if log else []
        averaged = self._average_all(given, compression, ready)
        if isinstance(log, GraphLog):
            _, num_bytes = _COMPRESSED[compression]
            log.write(
                ready,
                list(map(_clock, averaged, on_gpu)),
                {name: num_bytes(gradient) for name, gradient in given.items()},
                library=self.name if self._memory_for(compression) is None else SHARED_MEMORY,
                on_gpu=any(on_gpu),
            )
        remaining = iter(averaged)
        return [None if gradient is None else next(remaining) for gradient in gradients]

    def can_update(self, optimizer: Any, compression: str = "none") -> bool:
        """Returns True if ranks share memory, and the optimizer changes no averages."""
        return (
            self._memory_for(compression) is not None
            and isinstance(optimizer, HasOnePass)
            and optimizer.is_one_pass()
        )

    def update(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        learning_rate: Any,
        log: AllreduceLog | None = None,
    ) -> None:
        """Averages gradients and updates variables, of which each rank computes a part."""
        assert self._memory is not None
        given = _named(gradients, variables)
        ready = list(map(_clock, given.values(), [False] * len(given))) if log else []
        step = optimizer.one_pass(variables, learning_rate)
        # Nothing is averaged before all is there, as in `_average_all`.
        apart_s = self._memory.update(step, variables, given, [*given.values(), *ready])
        if isinstance(log, GraphLog):
            done = _clock(apart_s, on_gpu=False) - apart_s
            sizes = {name: _COMPRESSED["none"][1](gradient) for name, gradient in given.items()}
            log.write(ready, [done] * len(ready), sizes, library=SHARED_MEMORY)

    def _average_all(
        self, gradients: Mapping[str, Any], compression: str, ready: Sequence[Any]
    ) -> list[Any]:
        """Returns the averages of gradients, which have names, in their order.

        Args:
            gradients: The gradients.
            compression: One of COMPRESSIONS.
            ready: The times at which they were ready; none if these are not wanted.
        """
        memory = self._memory_for(compression)
        if memory is None:
            hvd, (average, _) = self._initialize(), _COMPRESSED[compression]
            return [average(hvd, gradient, name) for name, gradient in gradients.items()]
        # Ranks wait for each other, and TensorFlow orders what is ready in its own way on each of
        # them. So nothing is averaged before there is nothing else to do.
        after = [*gradients.values(), *ready]
        averages: list[Any] = []
        for name, gradient in gradients.items():
            averages.append(memory.average(gradient, name, averages[-1:] or after))
        return averages

    def _memory_for(self, compression: str) -> NodeMemory | None:
        """Returns what averages gradients, if that is not Horovod."""
        return self._memory if compression == "none" else None

    def broadcast_state(self, model: Any, root: int = 0) -> None:
        """Copies the root's weights and optimizer state to every rank.

        Of variables on a GPU, the host gets one element, to see when they have arrived.
        """
        import tensorflow as tf

        state = [*model.weights, *model.optimizer.variables]
        variables = [variable.value for variable in state]
        on_gpu = list(map(_is_on_gpu, state))
        in_turn = self._memory is not None

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def copy() -> tuple[Any, Any]:
            before: list[Any] = []
            begins, ends = [], []
            for i, variable in enumerate(variables):
                with tf.control_dependencies(before):
                    given = tf.convert_to_tensor(variable)
                begins.append(_clock(given, on_gpu[i]))
                received = self._broadcast(given, f"state.{i}", root, begins[-1:])
                ends.append(_clock(received, on_gpu[i]))
                # Nothing else uses it then, so the variable takes over its memory.
                with tf.control_dependencies(ends[-1:]):
                    assigned = variable.assign(received, read_value=False)
                before = [assigned] if in_turn else []
            return tf.reduce_min(begins), tf.reduce_max(ends)

        begin, end = copy()
        num_bytes = sum(value.shape.num_elements() * value.dtype.size for value in variables)
        library = self.name if self._memory is None else SHARED_MEMORY
        note_collective(
            library, "broadcast", num_bytes * (self.comm.rank == root), float(end - begin)
        )

    def _broadcast(self, value: Any, name: str, root: int, after: Sequence[Any]) -> Any:
        if self._memory is None:
            return _horovod().broadcast(value, root_rank=root, name=name)
        return self._memory.broadcast(value, name, root, after)


ENGINE = HorovodEngine


@runtime_checkable
class HasOnePass(Protocol):
    """An optimizer that can update weights in one pass: candle_p1.models.fast.optimizers."""

    def is_one_pass(self) -> bool:
        """Returns whether a step does nothing but `one_pass` with the gradients."""

    def one_pass(self, variables: Sequence[Any], learning_rate: Any) -> Update | None:
        """Returns how this step updates variables, or None if Keras has to do it."""


def _named(gradients: Sequence[Any], variables: Sequence[Any]) -> dict[str, Any]:
    """Returns the gradients that there are as dense tensors, by names that all ranks use."""
    import tensorflow as tf

    return {
        f"gradient.{i}.{variable.path}": tf.convert_to_tensor(gradient)
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
        if gradient is not None
    }


def _average(hvd: Any, gradient: Any, name: str) -> Any:
    return hvd.allreduce(gradient, op=hvd.Average, name=name)


def _average_as_half(hvd: Any, gradient: Any, name: str) -> Any:
    return average_as_half(
        gradient,
        hvd.size(),
        lambda largest: hvd.allreduce(largest, op=hvd.Max, name=f"largest.{name}"),
        lambda values: hvd.allreduce(values, op=hvd.Sum, name=name),
    )


_COMPRESSED: dict[str, tuple[Callable[..., Any], Callable[[Any], int]]] = {
    "none": (_average, lambda value: value.shape.num_elements() * value.dtype.size),
    "fp16": (_average_as_half, lambda value: value.shape.num_elements() * 2 + LARGEST_BYTES),
}
"""How a gradient is averaged, and how many bytes of it a rank sends, by compression."""


def _has_gpu() -> bool:
    import tensorflow as tf

    return bool(tf.config.get_visible_devices("GPU"))


def _is_on_gpu(variable: Any) -> bool:
    """Returns whether a Keras variable, and thereby its gradient, is on a GPU."""
    return "GPU" in str(variable.value.device)


def _clock(tensor: Any, on_gpu: bool) -> Any:
    return read_clock(tensor, on_gpu=on_gpu)


def _horovod() -> Any:
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
