"""Operations of TensorFlow's graphs, with which the engine horovod averages gradients."""

from __future__ import annotations

from abc import abstractmethod
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed import devices
from candle_p1.distributed.backend import choose_backend
from candle_p1.distributed.comm import Attempt
from candle_p1.distributed.engines.horovod import HorovodEngine
from candle_p1.distributed.transports.transport import (
    ALLREDUCE,
    ALLREDUCE_OF_16,
    NUM_TENSORS,
    PRODUCT_SIZE,
    Call,
    Overlap,
    Transport,
)

if TYPE_CHECKING:
    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.transports.transport import Floats


class GraphTransport(Transport):
    """Calls compiled functions that have an operation alone."""

    averages = True

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._names = count()

    def start(self) -> dict[str, Any]:
        """Limits TensorFlow to this rank's device, and starts what operates, as a run does."""
        Attempt(lambda: choose_backend("horovod")).agree(self.comm)
        engine = HorovodEngine(self.comm, "tensorflow")
        device = devices.configure(self.comm, engine)
        self._is_gpu = device.is_gpu
        found = self._start(engine)
        return {"device": device.name, "threads": device.threads} | found

    @abstractmethod
    def _start(self, engine: HorovodEngine) -> dict[str, Any]:
        """Starts what operates; returns its settings and the version of its library."""

    @abstractmethod
    def _operate(self, operation: str, tensor: Any, name: str, after: list[Any]) -> Any:
        """Returns the result of an operation, as part of a graph.

        Args:
            operation: Its name.
            tensor: What this rank contributes.
            name: A name that all ranks have in common.
            after: The result before it, if there is one.
        """

    def prepare(self, operation: str, values: Floats) -> Call:
        """Returns a call of a compiled function that has the operation alone."""
        import tensorflow as tf

        parts = np.array_split(values, NUM_TENSORS) if operation == ALLREDUCE_OF_16 else [values]
        tensors = [tf.constant(part) for part in parts]
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
        shape = (PRODUCT_SIZE, PRODUCT_SIZE)
        ones, mean = tf.ones(shape), tf.fill(shape, 1 / PRODUCT_SIZE)

        def products(num_products: Any) -> Any:
            return tf.while_loop(
                lambda i, x: i < num_products,
                lambda i, x: (i + 1, tf.matmul(x, mean)),
                (tf.constant(0), ones),
                parallel_iterations=1,
            )[1]

        alone = tf.function(products)

        def both(num_products: Any) -> list[Any]:
            return [self._operate(ALLREDUCE, tensor, name, []), products(num_products)]

        together = tf.function(both)
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
