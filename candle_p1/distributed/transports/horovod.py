"""Horovod's operations in TensorFlow's graphs, by which the engine horovod averages gradients."""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed import devices
from candle_p1.distributed.backend import choose_backend
from candle_p1.distributed.comm import Attempt
from candle_p1.distributed.engines.engine import HOROVOD
from candle_p1.distributed.engines.horovod import HorovodEngine
from candle_p1.distributed.transports.transport import (
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_OF_16,
    BROADCAST,
    NUM_TENSORS,
    PRODUCT_SIZE,
    REDUCE_SCATTER,
    Call,
    Overlap,
    Transport,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from candle_p1.distributed.transports.transport import Floats

FUSION, CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"


class HorovodTransport(Transport):
    """Calls Horovod as a run does, with its settings."""

    operations: Sequence[str] = (ALLREDUCE, ALLREDUCE_OF_16, BROADCAST, ALLGATHER, REDUCE_SCATTER)
    averages = True
    own: Mapping[str, str] = {}
    """Horovod's variables that it sets, in ms and bytes; others are as a run has them."""

    def start(self) -> dict[str, Any]:
        """Starts Horovod, and limits TensorFlow to this rank's device, as a run does."""
        os.environ.update(self.own)
        Attempt(lambda: choose_backend("horovod")).agree(self.comm)
        engine = HorovodEngine(self.comm, "tensorflow")
        device = devices.configure(self.comm, engine)
        settings: dict[str, Any] = engine.start(averaging=HOROVOD)["settings"]
        import horovod.tensorflow as hvd
        import tensorflow as tf

        self._hvd, self._tf = hvd, tf
        self._is_gpu, self._names = device.is_gpu, count()
        library = f"Horovod {_version('horovod')}, TensorFlow {tf.__version__}"
        return {"library": library, "device": device.name, "threads": device.threads, **settings}

    def stop(self) -> None:
        """Shuts Horovod down: its thread would disturb what is measured next."""
        self._hvd.shutdown()

    def prepare(self, operation: str, values: Floats) -> Call:
        """Returns a call of a compiled function that has the operation alone."""
        parts = np.array_split(values, NUM_TENSORS) if operation == ALLREDUCE_OF_16 else [values]
        tensors = [self._tf.constant(part) for part in parts]
        names = [f"{operation}.{next(self._names)}" for _ in tensors]
        operations: dict[str, Callable[[Any, str], Any]] = {
            ALLREDUCE: self._averaged,
            ALLREDUCE_OF_16: self._averaged,
            BROADCAST: lambda x, name: self._hvd.broadcast(x, root_rank=0, name=name),
            ALLGATHER: lambda x, name: self._hvd.allgather(x, name=name),
            REDUCE_SCATTER: lambda x, name: self._hvd.reducescatter(x, op=self._hvd.Sum, name=name),
        }
        operate = operations[operation]

        def operate_all() -> list[Any]:
            return [operate(each, name) for each, name in zip(tensors, names, strict=True)]

        call: Any = self._tf.function(operate_all)
        last: list[Any] = []

        def run() -> None:
            last[:] = call()
            self._await(last)

        return Call(run, lambda: np.concatenate([np.asarray(each) for each in last]))

    def overlap(self, values: Floats) -> Overlap:
        """Returns a graph of an allreduce and of products that do not depend on it.

        So are gradients averaged while back-propagation goes on.
        """
        tf = self._tf
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
            return [self._averaged(tensor, name), products(num_products)]

        together = tf.function(both)
        return Overlap(
            lambda num: self._await([alone(tf.constant(num))]),
            lambda num: self._await(together(tf.constant(num))),
        )

    def _averaged(self, tensor: Any, name: str) -> Any:
        return self._hvd.allreduce(tensor, op=self._hvd.Average, name=name)

    def _await(self, tensors: list[Any]) -> None:
        """Waits until tensors are there: on a GPU a function returns when its work is queued."""
        if self._is_gpu:
            for tensor in tensors:
                self._tf.reshape(tensor, [-1])[0].numpy()


class FusingHorovod(HorovodTransport):
    """Calls Horovod with the settings that it has by itself."""

    operations = (ALLREDUCE, ALLREDUCE_OF_16)
    own: Mapping[str, str] = {FUSION: str(128 << 20), CYCLE: "1"}


class PapersHorovod(HorovodTransport):
    """Calls Horovod with the settings that it had by itself when the paper was written."""

    operations = (ALLREDUCE, ALLREDUCE_OF_16)
    own: Mapping[str, str] = {FUSION: str(64 << 20), CYCLE: "5"}


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
