"""What models predict: many samples of every time, of which intervals are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PREDICTION_CONFIDENCE = 0.90


class Interval(TypedDict):
    """A number with the ends of an interval, or of the span of all readings of what is unknown."""

    value: float
    low: float
    high: float


def interval_of(
    samples: Array, confidence: float | None = PREDICTION_CONFIDENCE, method: str = "linear"
) -> Interval:
    """Returns the median of samples with their central interval (method: as numpy.percentile).

    Without a confidence, the samples are readings: the first is the value, and the interval is the
    span of all.
    """
    if confidence is None:
        low, value, high = samples.min(), samples[0], samples.max()
    else:
        tail = 50 * (1 - confidence)
        ends: Array = np.percentile(samples, [tail, 50, 100 - tail], method=method)  # type: ignore[call-overload]
        low, value, high = ends
    return {"value": float(value), "low": float(low), "high": float(high)}


@dataclass(frozen=True)
class TimeSamples:
    """What a model predicts for runs on some ranks, sample by sample."""

    num_ranks: int
    phases_s: Mapping[str, Array]  # the seconds of each phase, shape (samples,) each
    # the power of the job in each phase, likewise; None where it is not known
    watts: Mapping[str, Array] | None
    extrapolation: float  # by which factor the number of ranks is outside those that are known

    @property
    def total_s(self) -> Array:
        """The seconds of the run, shape (samples,)."""
        total_s: Array = np.sum(list(self.phases_s.values()), axis=0)
        return total_s

    @property
    def energy_j(self) -> Array | None:
        """The energy of the job, shape (samples,); None where no power is known."""
        if self.watts is None:
            return None
        energy_j: Array = np.sum([self.watts[n] * s for n, s in self.phases_s.items()], axis=0)
        return energy_j
