"""Times the steps of an epoch, and keeps what the weights are meanwhile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.bench.memory import MemorySampler
from candle_p1.bench.step import MAX_COMPARED, WARM_UP_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from candle_p1.bench.memory import MemorySamples
    from candle_p1.distributed.comm import Communicator

    Elements = dict[str, NDArray[np.float64]]


class StepTimer:
    """What a callback of either generation of Keras does; see `as_callback`.

    A step is timed from the end of the one before, which includes making the batch.

    Args:
        comm: The ranks, which begin the first timed step together.
        weights: Returns a model's trainable weights by name.
        num_steps: The number of timed steps.
        samples_memory: Whether there is a last step, in which the memory is sampled.

    Attributes:
        seconds: The time of every step.
        losses: The mean loss of the epoch so far, after every step.
        updates: See StepOutcome.
        values: See StepOutcome.
        memory: Memory samples during the last step.
    """

    def __init__(
        self,
        comm: Communicator,
        weights: Callable[[Any], Mapping[str, NDArray[Any]]],
        num_steps: int,
        *,
        samples_memory: bool,
    ) -> None:
        self._comm, self._weights, self._samples_memory = comm, weights, samples_memory
        self._compared_steps = WARM_UP_STEPS + num_steps
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.updates: dict[str, list[float]] = {}
        self.values: dict[str, list[float]] = {}
        self.memory: MemorySamples = []
        self._sampler: MemorySampler | None = None

    def begin(self, model: Any) -> None:
        """Is called when training begins."""
        self._before = self._elements(model)
        self._start = time.perf_counter()

    def end_step(self, model: Any, logs: Mapping[str, float]) -> None:
        """Is called at the end of a step."""
        self.losses.append(float(logs["loss"]))  # waits for a step that is asynchronous
        self.seconds.append(time.perf_counter() - self._start)
        num_done = len(self.seconds)
        if num_done == WARM_UP_STEPS:
            after = self._elements(model)
            self.updates = {name: (after[name] - self._before[name]).tolist() for name in after}
            del self._before
            self._comm.barrier()
        if num_done == self._compared_steps:
            self.values = {name: found.tolist() for name, found in self._elements(model).items()}
            if self._samples_memory:
                self._sampler = MemorySampler()
        self._start = time.perf_counter()

    def end(self) -> None:
        """Is called when training ends."""
        if self._sampler:
            self.memory = self._sampler.stop()

    def _elements(self, model: Any) -> Elements:
        """Returns some elements of every weight, evenly spaced."""
        found = {}
        for name, values in self._weights(model).items():
            stride = -(-values.size // MAX_COMPARED)
            found[name] = values.reshape(-1)[::stride].astype(float)
        return found


def as_callback(timer: StepTimer, base: Any) -> Any:
    """Returns a callback that calls the timer.

    Args:
        timer: The timer.
        base: The class Callback of keras or tf_keras.
    """

    # On JAX, a model has its weights during an epoch only where a callback asks for `self.model`.
    class Callback(base):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            timer.begin(self.model)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            timer.end_step(self.model, logs)

        def on_train_end(self, logs: Any = None) -> None:
            timer.end()

    return Callback()
