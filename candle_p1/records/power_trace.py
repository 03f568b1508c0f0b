"""What a sensor has read over time, and the energy between two times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

Domain = Literal["node", "cpu", "memory", "gpu"]
Reading = Literal["energy", "power"]
REPLAYED = "replay:"
"""Before the name of a source whose readings are replayed."""

Kind = Literal["measured", "estimated", "simulated", "absent"]
KINDS: tuple[Kind, ...] = ("measured", "estimated", "simulated", "absent")
"""From the best to the worst: a sum is of the worst kind of its parts."""

MIN_SAMPLES = 3
"""With fewer samples, an energy is an estimate from those around it."""
MAX_GAP = 3
"""Sampling intervals between two samples; what lies in a longer gap is not seen."""
MAX_UNSEEN = 0.01
"""The share of a time that may not be seen; beyond it, the energy is an estimate."""
MAX_GUESSED_GAP_S = 1.0
"""How long a gap may be for a time within it to be given an estimate: while a framework is imported
or traces a model, no other thread of the process reads a sensor."""
MAX_STANDSTILL = 10
"""Sampling intervals, or renewals, that a counter may stay as it is. Every device takes power."""
USUAL_RESOLUTION_S = 0.1
"""Of a counter that does not tell."""


@dataclass(frozen=True)
class Channel:
    """One sensor of one device.

    Attributes:
        device: The device, unique on its host: "gpu:GPU-5f3c...", "package-0", "dram-0", "node".
        label: What a reader knows it by.
        domain: What it is a part of; a node's sensor covers the rest of the node too.
        source: The name of its source.
        reading: "energy": a counter that only grows; "power": what flows at the moment.
        unit: What one count is, in J of a counter and in W of power.
        modulus: The count at which a counter starts from 0 again; None where it does not.
        limit_w: A mean power that the device cannot reach. It tells a counter that has started from
            0 again from one that was reset.
        resolution_s: How often the sensor renews its value, or what it averages over; None where
            that is not known.
    """

    device: str
    label: str
    domain: Domain
    source: str
    reading: Reading
    unit: float = 1.0
    modulus: int | None = None
    limit_w: float = inf
    resolution_s: float | None = None

    @property
    def is_simulated(self) -> bool:
        """Whether its values are replayed."""
        return self.source.startswith(REPLAYED)

    @property
    def sensor(self) -> str:
        """The name of the source that its values come from, in the first place."""
        return self.source.removeprefix(REPLAYED)


@dataclass(frozen=True)
class Energy:
    """The energy of a device over a time.

    Attributes:
        kind: How it is known. An estimate lies between samples more than on them.
        duration_s: How long the time was.
        energy_j: The energy; None where it is absent.
        num_samples: The samples within the time.
        few_samples: Whether the time is too short for the sensor: below three samples, or three
            renewals of its value.
        reason: Why it is absent.
    """

    kind: Kind
    duration_s: float
    energy_j: float | None = None
    num_samples: int = 0
    few_samples: bool = False
    reason: str | None = None

    @property
    def mean_w(self) -> float | None:
        """The mean power."""
        return None if self.energy_j is None else self.energy_j / self.duration_s


def worst(kinds: Iterable[Kind]) -> Kind:
    """Returns the kind of a sum of quantities of these kinds."""
    return max(kinds, key=KINDS.index)


def add(parts: Iterable[Energy]) -> Energy:
    """Returns the energy of one device over several times, which do not overlap.

    One absent part makes the sum absent.
    """
    parts = list(parts)
    energies = [part.energy_j for part in parts if part.energy_j is not None]
    num_samples = sum(part.num_samples for part in parts)
    return Energy(
        kind=worst(part.kind for part in parts),
        duration_s=sum(part.duration_s for part in parts),
        energy_j=sum(energies) if len(energies) == len(parts) else None,
        num_samples=num_samples,
        few_samples=num_samples < MIN_SAMPLES or all(part.few_samples for part in parts),
        reason=next((part.reason for part in parts if part.reason), None),
    )


@dataclass(frozen=True)
class Trace:
    """What one channel has read.

    Attributes:
        channel: The channel.
        times_s: When, ascending.
        values: J of a counter, in J that only grow; W of power.
        interval_s: The time between two samples, as it was asked for.
        ended: Why there are no further samples, where the sensor failed.
    """

    channel: Channel
    times_s: NDArray[np.float64]
    values: NDArray[np.float64]
    interval_s: float
    ended: str | None = None

    def energy(self, begin_s: float, end_s: float) -> Energy:
        """Returns the energy between two times.

        Energies of times that follow each other add up to that of the whole: each is the difference
        of one function of time, linear between the samples of a counter and the integral of lines
        between samples of power. Beyond the samples it goes on for one sampling interval at most.
        """
        duration_s = end_s - begin_s
        within = (self.times_s >= begin_s) & (self.times_s <= end_s)
        num_samples = int(np.count_nonzero(within))
        reason = self._why_absent(begin_s, end_s)
        if reason is not None:
            return Energy("absent", duration_s, None, num_samples, reason=reason)
        energy_j = self._until(end_s) - self._until(begin_s)
        if energy_j <= 0:
            reason = f"the sensor shows no energy in {duration_s:.3g} s, so it was too short for it"
            return Energy("absent", duration_s, None, num_samples, reason=reason)
        few = num_samples < MIN_SAMPLES or duration_s < MIN_SAMPLES * (
            self.channel.resolution_s or 0
        )
        unseen = self._unseen_s(begin_s, end_s) > MAX_UNSEEN * duration_s
        kind: Kind = "estimated" if few or unseen else "measured"
        if self.channel.is_simulated:
            kind = "simulated"
        return Energy(kind, duration_s, energy_j, num_samples, few)

    def _why_absent(self, begin_s: float, end_s: float) -> str | None:
        duration_s = end_s - begin_s
        if duration_s <= 0:
            return "it took no time"
        if len(self.times_s) < 2:
            return self.ended or "there are fewer than two samples"
        first_s, last_s = self.times_s[0], self.times_s[-1]
        if begin_s < first_s - self.interval_s:
            return f"the first sample came {first_s - begin_s:.3g} s after its begin"
        if end_s > last_s + self.interval_s:
            return self.ended or f"the last sample came {end_s - last_s:.3g} s before its end"
        if self.channel.reading == "energy":
            stood_s = self._longest_standstill_s(begin_s, end_s)
            if stood_s > MAX_STANDSTILL * max(
                self.interval_s, self.channel.resolution_s or USUAL_RESOLUTION_S
            ):
                return f"the counter stood still for {stood_s:.3g} s"
        longest_s = self._longest_gap_s(begin_s, end_s)
        if self._gaps_s(begin_s, end_s) > duration_s / 2 and longest_s > MAX_GUESSED_GAP_S:
            return f"the sensor was not read for {longest_s:.3g} s, more than half of it"
        return None

    def _longest_standstill_s(self, begin_s: float, end_s: float) -> float:
        """Returns how long the counter stayed as it was, at most, where that touches a time."""
        moved = np.flatnonzero(np.diff(self.values) != 0)
        # The counter is the same from one of these samples to the one before the next of them.
        starts = self.times_s[np.r_[0, moved + 1]]
        ends = self.times_s[np.r_[moved, len(self.values) - 1]]
        touching = (starts < end_s) & (ends > begin_s)
        return float(np.max((ends - starts)[touching], initial=0.0))

    def _unseen_s(self, begin_s: float, end_s: float) -> float:
        """Returns how much of a time lies in gaps or beyond the samples."""
        before_s, after_s = self.times_s[0] - begin_s, end_s - self.times_s[-1]
        return self._gaps_s(begin_s, end_s) + float(max(before_s, 0.0) + max(after_s, 0.0))

    def _gaps_s(self, begin_s: float, end_s: float) -> float:
        """Returns how much of a time lies in gaps between samples, where its energy is not known.

        A counter counts on in a gap, so that only a gap at the begin or the end of the time hides
        something.
        """
        starts, ends = self.times_s[:-1], self.times_s[1:]
        # Ticks come a little late, also where none is missed.
        long = ends - starts > (MAX_GAP + 0.5) * self.interval_s
        if self.channel.reading == "energy":
            long &= (starts < begin_s) | (ends > end_s)
        shares = np.minimum(ends[long], end_s) - np.maximum(starts[long], begin_s)
        return float(np.sum(np.maximum(shares, 0.0)))

    def _longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Returns the longest time between two samples that touches a time."""
        starts, ends = self.times_s[:-1], self.times_s[1:]
        touching = (starts < end_s) & (ends > begin_s)
        return float(np.max((ends - starts)[touching], initial=0.0))

    def _until(self, time_s: float) -> float:
        """Returns the energy up to a time, in J, from a zero that is the same for all times."""
        times_s, values = self.times_s, self.values
        k = int(np.clip(np.searchsorted(times_s, time_s, side="right") - 1, 0, len(times_s) - 2))
        if self.channel.reading == "energy":
            if time_s < times_s[0]:
                return float(
                    values[0] + self._slope(slice(None, MAX_STANDSTILL)) * (time_s - times_s[0])
                )
            if time_s > times_s[-1]:
                return float(
                    values[-1] + self._slope(slice(-MAX_STANDSTILL, None)) * (time_s - times_s[-1])
                )
            return float(np.interp(time_s, times_s[k : k + 2], values[k : k + 2]))
        power_w = np.interp(time_s, times_s[k : k + 2], values[k : k + 2])
        # From the nearer sample, so that the last value, and not a line, goes on beyond the end.
        if time_s > times_s[-1]:
            return float(self._integral_j[-1] + power_w * (time_s - times_s[-1]))
        if time_s < times_s[0]:
            return float(power_w * (time_s - times_s[0]))
        return float(self._integral_j[k] + (values[k] + power_w) / 2 * (time_s - times_s[k]))

    def _slope(self, part: slice) -> float:
        """Returns the mean power of a counter over some of its samples."""
        times_s, values = self.times_s[part], self.values[part]
        return float((values[-1] - values[0]) / (times_s[-1] - times_s[0]))

    @cached_property
    def _integral_j(self) -> NDArray[np.float64]:
        steps = np.diff(self.times_s) * (self.values[1:] + self.values[:-1]) / 2
        return np.concatenate([[0.0], np.cumsum(steps)])
