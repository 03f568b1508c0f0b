"""XLA's collectives in compiled programs, by which the engine jax averages gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed import devices
from candle_p1.distributed.backend import choose_backend
from candle_p1.distributed.comm import Attempt
from candle_p1.distributed.engines.jax import AXIS, JaxEngine
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
    from collections.abc import Callable, Sequence

    from candle_p1.distributed.transports.transport import Floats


class JaxTransport(Transport):
    """Calls XLA's collectives on the devices of all ranks."""

    operations: Sequence[str] = (ALLREDUCE, ALLREDUCE_OF_16, BROADCAST, ALLGATHER, REDUCE_SCATTER)
    averages = True

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

        parts = np.array_split(values, NUM_TENSORS) if operation == ALLREDUCE_OF_16 else [values]
        if operation == BROADCAST:  # as the engine does it: the others add zeros to the root's bits
            parts = [each.view(np.uint32) for each in parts]
            if self.comm.rank:
                parts = [np.zeros_like(each) for each in parts]
        operations: dict[str, Callable[[Any], Any]] = {
            ALLREDUCE: lambda x: jax.lax.pmean(x, AXIS),
            ALLREDUCE_OF_16: lambda x: jax.lax.pmean(x, AXIS),
            BROADCAST: lambda x: jax.lax.psum(x, AXIS),
            ALLGATHER: lambda x: jax.lax.all_gather(x, AXIS, tiled=True),
            REDUCE_SCATTER: lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True),
        }
        operate = operations[operation]
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

        shape = (PRODUCT_SIZE, PRODUCT_SIZE)
        ones, mean = np.ones(shape, np.float32), np.full(shape, 1 / PRODUCT_SIZE, np.float32)

        def products(num_products: Any) -> Any:
            return jax.lax.fori_loop(0, num_products, lambda i, x: x @ mean, ones)

        def both(array: Any, num_products: Any) -> tuple[Any, Any]:
            return jax.lax.pmean(array, AXIS), products(num_products)

        alone = self._engine.prepared(products)
        together = self._engine.prepared(both, values)
        return Overlap(
            lambda num: jax.block_until_ready(alone(np.int32(num))),
            lambda num: jax.block_until_ready(together(np.int32(num))),
        )
