"""The allreduces of a step that XLA compiles, which calls the host to read the clock.

The host is called three times per step, with one element of each gradient: when the first gradient
is ready, which is that of the last layer; when all are ready, which is the end of back-propagation;
and when all averages are available. XLA may exchange several gradients at once, so they are one
entry of the log.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed.allreduce_log import AllreduceLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from candle_p1.instrument.collectives import CommunicationLog

FIRST, READY, DONE = range(3)
"""The moments of a step."""
NAME = "gradients"


class HostLog(AllreduceLog):
    """The allreduces of a model that JAX trains."""

    library = "jax"

    def __init__(self, log: CommunicationLog) -> None:
        super().__init__(log)
        self._num_bytes = 0
        self._times: tuple[list[float], list[float], list[float]] = ([], [], [])

    def note_ready(self, gradients: Sequence[Any], num_bytes: int) -> None:
        """Notes when the first gradient is ready, and when all are; part of the step.

        Args:
            gradients: Those of all variables, in the order of the layers.
            num_bytes: How many bytes of them a rank sends.
        """
        self._num_bytes, self.waits_for = num_bytes, "element"
        self._note(FIRST, gradients[-1:])
        self._note(READY, gradients)

    def note_done(self, averages: Sequence[Any]) -> None:
        """Notes when all averages are available; part of the step."""
        self._note(DONE, averages)

    def example(self, num_gradients: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Returns two functions: a step that does nothing but log, and one that does nothing."""
        import jax

        def logged(value: Any) -> Any:
            values = [value + number for number in range(num_gradients)]
            self.note_ready(values, 4 * num_gradients)
            self.note_done(values)
            return value

        def bare(value: Any) -> Any:
            return value + 0

        zero = jax.numpy.zeros(())
        steps = [jax.jit(logged), jax.jit(bare)]

        def call(step: Any) -> Callable[[], Any]:
            return lambda: (jax.block_until_ready(step(zero)), jax.effects_barrier())

        return call(steps[0]), call(steps[1])

    def _note(self, moment: int, values: Sequence[Any]) -> None:
        import jax

        times = self._times[moment]

        def read_clock(*elements: Any) -> None:
            times.append(time.perf_counter())

        jax.debug.callback(read_clock, *(value.reshape(-1)[0] for value in values))

    def _take_rows(self) -> tuple[dict[str, int], NDArray[np.float64]]:
        """Returns the steps that have been computed, which it waits for."""
        import jax

        jax.effects_barrier()
        first, ready, done = (np.array(times) for times in self._times)
        for times in self._times:
            times.clear()
        if not len(done):
            return {}, np.empty((0, 2, 0))
        self._ready = ready
        return {NAME: self._num_bytes}, np.stack([first, done], axis=1)[:, :, None]

    def _exposed(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the time from the last gradient's being ready to the last average, in s."""
        return np.asarray(np.maximum(rows[:, 1, 0] - self._ready, 0.0))
