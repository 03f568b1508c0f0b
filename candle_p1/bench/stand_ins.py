"""What stands in for TensorFlow and for sensors in a simulated run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.models.evaluation import Trained
from candle_p1.records.power_file import write_traces
from candle_p1.records.power_trace import Channel, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from candle_p1.data.samples import Samples

METRICS = ("loss", "accuracy")
NUM_GPUS = 6
"""On each node, as on Summit."""
HOUR_S = 3600.0


def write_power(path: Path) -> None:
    """Writes a recording of a node's GPUs that lasts an hour, for ``--power replay:FILE``."""
    times_s, watts = np.array([0.0, HOUR_S]), np.array([300.0, 300.0])
    traces = [Trace(_gpu(number), times_s, watts, HOUR_S) for number in range(NUM_GPUS)]
    write_traces(path, traces, node=0, start_s=0.0)


def _gpu(number: int) -> Channel:
    return Channel(f"gpu:GPU-{number:032x}", "Tesla V100-SXM2-16GB", "gpu", "nvml", "power")


class _Variable:
    """A variable of a metric, as far as `reduce_metrics` needs it."""

    def __init__(self, value: float) -> None:
        self._value = np.array(value)
        self.shape = self._value.shape

    def numpy(self) -> Any:
        """Returns the value."""
        return self._value

    def assign(self, value: Any) -> None:
        """Takes a value."""
        self._value = np.array(value)


class ModelWithMetrics:
    """A model that has metrics, each a sum and a count, and has seen samples."""

    def __init__(self) -> None:
        self.metrics = [SimpleNamespace(variables=[_Variable(1), _Variable(2)]) for _ in METRICS]

    def get_metrics_result(self) -> dict[str, float]:
        """Returns the metrics by name."""
        return dict.fromkeys(METRICS, 0.5)


class WithoutKeras(Trained):
    """Predicts one sample on each rank, without Keras."""

    def _predictions(
        self, samples: Samples, max_steps: int, model: Any
    ) -> Iterator[tuple[Any, Any]]:
        yield np.zeros(1), np.ones((1, 2))
