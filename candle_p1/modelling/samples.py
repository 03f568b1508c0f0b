"""What models predict: many samples of every time, of which intervals are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

PREDICTION_CONFIDENCE = 0.90


@dataclass(frozen=True)
class ValueInterval:
    """A number with an interval.

    Attributes:
        value: The number.
        low: The lower end.
        high: The upper end.
        confidence: The nominal probability that the interval covers the true value; None for a
            span, whose ends are those of all readings of what is not known.
    """

    value: float
    low: float
    high: float
    confidence: float | None

    @classmethod
    def of(cls, samples: Array, confidence: float | None = PREDICTION_CONFIDENCE) -> ValueInterval:
        """Returns the median of samples with their central interval.

        Without a confidence, the samples are readings: the first is the value, and the interval is
        the span of all.
        """
        if confidence is None:
            return cls(float(samples[0]), float(samples.min()), float(samples.max()), None)
        tail = 50 * (1 - confidence)
        low, middle, high = np.percentile(samples, [tail, 50, 100 - tail])
        return cls(float(middle), float(low), float(high), confidence)

    def to_dict(self) -> dict[str, float]:
        """Returns value, low and high as JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class TimeSamples:
    """What a model predicts for runs on some ranks, sample by sample.

    Attributes:
        num_ranks: The number of ranks.
        phases_s: The seconds of each phase, by name, shape (samples,) each.
        watts: The power of the job in each phase, likewise; None where it is not known.
        extrapolation: By which factor the number of ranks is outside those that are known; 1 within
            them.
    """

    num_ranks: int
    phases_s: Mapping[str, Array]
    watts: Mapping[str, Array] | None
    extrapolation: float

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
        energies = [self.watts[name] * seconds for name, seconds in self.phases_s.items()]
        energy_j: Array = np.sum(energies, axis=0)
        return energy_j
