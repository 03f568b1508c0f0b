"""The readings of a sensor over time, the energy between two times, and their files.

A file is CSV, one line per reading. The value of an energy counter is in J, from an arbitrary
origin; that of power is in W.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from candle_p1.errors import DataError
from candle_p1.files import read_regular_bytes, write_atomically
from candle_p1.records.types import EnergyKind, PowerDomain, PowerReading, worst
from candle_p1.text import printable

REPLAYED = "replay:"
"""The prefix of a source whose readings are replayed."""

MIN_SAMPLES = 3
"""With fewer samples in an interval, its energy is estimated from those around it."""
MAX_GAP = 3.5
"""If two samples are more than this many sampling intervals apart, there is a gap between them:
they may be a little late even if none is missed."""
MAX_UNSEEN = 0.01
"""If a larger share of an interval lies in gaps, its energy is an estimate."""
MAX_GUESSED_GAP_S = 1.0
"""If an interval lies mostly in a gap longer than this, its energy is unknown. Shorter gaps are
normal: while the process imports a framework or traces a model, no other thread reads a sensor."""
MAX_UNCHANGED = 10
"""How many sampling intervals, or updates, a counter may stay constant: all devices use power."""


@dataclass(frozen=True)
class Channel:
    """One sensor of one device; see also `candle_p1.records.types.DeviceGroup`.

    A node's sensor includes all others of that node, a module's a processor, its memory and a GPU.
    """

    device: str
    """Unique on its host: "gpu:GPU-5f3c...", "package-0", "dram-0", "node"."""
    label: str
    """The device's name in reports."""
    domain: PowerDomain
    source: str
    reading: PowerReading
    unit: float = 1.0
    """The size of one count: in J for an energy counter, in W for power."""
    modulus: int | None = None
    """The value at which a counter wraps around to 0; None if it does not."""
    limit_w: float = inf
    """A mean power that the device cannot reach."""
    resolution_s: float | None = None

    @property
    def sensor(self) -> str:
        """The name of the source that took the readings, even if they are replayed now."""
        return self.source.removeprefix(REPLAYED)


@dataclass(frozen=True)
class Energy:
    """The energy that a device uses in an interval of time; None if it is absent, for a reason.

    Samples are few if the interval is too short for the sensor: fewer than three samples, or fewer
    than three updates of its value.
    """

    kind: EnergyKind
    duration_s: float
    energy_j: float | None = None
    num_samples: int = 0
    few_samples: bool = False
    reason: str | None = None

    @property
    def mean_w(self) -> float | None:
        """The mean power."""
        return None if self.energy_j is None else self.energy_j / self.duration_s


def add(intervals: Sequence[Energy]) -> Energy:
    """Returns the energy of one device over several intervals that do not overlap.

    If that of one is absent, so is the sum.
    """
    energies = [each.energy_j for each in intervals if each.energy_j is not None]
    num_samples = sum(each.num_samples for each in intervals)
    return Energy(
        kind=worst(each.kind for each in intervals),
        duration_s=sum(each.duration_s for each in intervals),
        energy_j=sum(energies) if len(energies) == len(intervals) else None,
        num_samples=num_samples,
        few_samples=num_samples < MIN_SAMPLES or all(each.few_samples for each in intervals),
        reason=next((each.reason for each in intervals if each.reason), None),
    )


@dataclass(frozen=True)
class Trace:
    """The readings of one channel, which should be `interval_s` apart.

    The times ascend, as do the values of an energy counter, in J; those of power are in W. If the
    sensor failed, `ended` says why there are no further ones.
    """

    channel: Channel
    times_s: NDArray[np.float64]
    values: NDArray[np.float64]
    interval_s: float
    ended: str | None = None

    def energy(self, begin_s: float, end_s: float) -> Energy:
        """Returns the energy between two times.

        The energies of consecutive intervals add up to that of the whole, because each is a
        difference of one function of time. For a counter, this function is the linear interpolation
        of its samples; for power, it is the integral of that interpolation. It is extrapolated by
        one sampling interval at most.
        """
        duration_s = end_s - begin_s
        within = (self.times_s >= begin_s) & (self.times_s <= end_s)
        num_samples = int(np.count_nonzero(within))
        reason = self._why_absent(begin_s, end_s)
        if reason is not None:
            return Energy("absent", duration_s, None, num_samples, reason=reason)
        energy_j = self._until(end_s) - self._until(begin_s)
        if energy_j <= 0:
            reason = f"the sensor shows no energy in {duration_s:.3g} s, which is too short for it"
            return Energy("absent", duration_s, None, num_samples, reason=reason)
        few = num_samples < MIN_SAMPLES or duration_s < MIN_SAMPLES * (
            self.channel.resolution_s or 0
        )
        outside_s = max(self.times_s[0] - begin_s, 0.0) + max(end_s - self.times_s[-1], 0.0)
        unseen = self._gaps_s(begin_s, end_s) + outside_s > MAX_UNSEEN * duration_s
        kind: EnergyKind = "estimated" if few or unseen else "measured"
        if self.channel.source != self.channel.sensor:
            kind = "simulated"
        return Energy(kind, duration_s, energy_j, num_samples, few)

    def _why_absent(self, begin_s: float, end_s: float) -> str | None:
        duration_s = end_s - begin_s
        if duration_s <= 0:
            return "its duration is 0"
        if len(self.times_s) < 2:
            return self.ended or "there are fewer than two samples"
        first_s, last_s = self.times_s[0], self.times_s[-1]
        if begin_s < first_s - self.interval_s:
            return f"the first sample was taken {first_s - begin_s:.3g} s after its beginning"
        if end_s > last_s + self.interval_s:
            return self.ended or f"the last sample was taken {end_s - last_s:.3g} s before its end"
        if self.channel.reading == "energy":
            unchanged_s = self._longest_unchanged_s(begin_s, end_s)
            if unchanged_s > MAX_UNCHANGED * max(self.interval_s, self.channel.resolution_s or 0.1):
                return f"the counter did not change for {unchanged_s:.3g} s"
        longest_s = _longest_s(self.times_s[:-1], self.times_s[1:], begin_s, end_s)
        if self._gaps_s(begin_s, end_s) > duration_s / 2 and longest_s > MAX_GUESSED_GAP_S:
            return f"the sensor was not read for {longest_s:.3g} s, most of this time"
        return None

    def _longest_unchanged_s(self, begin_s: float, end_s: float) -> float:
        """Returns the longest time without a change of the counter that overlaps an interval."""
        moved = np.flatnonzero(np.diff(self.values) != 0)
        # The counter is constant from each start to the corresponding end.
        starts = self.times_s[np.r_[0, moved + 1]]
        ends = self.times_s[np.r_[moved, len(self.values) - 1]]
        return _longest_s(starts, ends, begin_s, end_s)

    def _gaps_s(self, begin_s: float, end_s: float) -> float:
        """Returns how much of an interval lies in gaps in which its energy is unknown.

        A counter continues to count in a gap, so only gaps at the ends of the interval matter.
        """
        starts, ends = self.times_s[:-1], self.times_s[1:]
        long = ends - starts > MAX_GAP * self.interval_s
        if self.channel.reading == "energy":
            long &= (starts < begin_s) | (ends > end_s)
        shares = np.minimum(ends[long], end_s) - np.maximum(starts[long], begin_s)
        return float(np.sum(np.maximum(shares, 0.0)))

    def _until(self, time_s: float) -> float:
        """Returns the energy up to a time, from an origin that is the same for all times."""
        times_s, values = self.times_s, self.values
        inside_s = float(np.clip(time_s, times_s[0], times_s[-1]))
        value = np.interp(inside_s, times_s, values)
        if self.channel.reading == "energy":
            until_j, is_before = value, time_s < times_s[0]
            near = slice(None, MAX_UNCHANGED) if is_before else slice(-MAX_UNCHANGED, None)
            outside_w = np.ptp(values[near]) / np.ptp(times_s[near])
        else:
            k = np.searchsorted(times_s, inside_s, side="right") - 1
            until_j = self._integral_j[k] + (values[k] + value) / 2 * (inside_s - times_s[k])
            outside_w = value
        return float(until_j + outside_w * (time_s - inside_s))

    @cached_property
    def _integral_j(self) -> NDArray[np.float64]:
        steps = np.diff(self.times_s) * (self.values[1:] + self.values[:-1]) / 2
        return np.concatenate([[0.0], np.cumsum(steps)])


def _longest_s(
    starts: NDArray[np.float64], ends: NDArray[np.float64], begin_s: float, end_s: float
) -> float:
    """Returns the longest of the times that overlap an interval."""
    overlaps = (starts < end_s) & (ends > begin_s)
    return float(np.max((ends - starts)[overlaps], initial=0.0))


OF_CHANNEL = ("device", "label", "domain", "source", "reading", "resolution_s")
COLUMNS = ("time_s", "node", *OF_CHANNEL, "value")
"""The value of an energy counter is in J, from an arbitrary origin; that of power is in W."""

MAX_FILE_BYTES, MAX_NUMBER = 2**30, 1e15


def write_traces(path: Path, traces: Iterable[Trace], node: int, start_s: float) -> None:
    """Writes the traces of a node; those without samples do not appear in the file.

    Times in the file are since `start_s`.

    Raises:
        OSError: The file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    of_channel = attrgetter(*OF_CHANNEL)
    for trace in traces:
        facts = node, *of_channel(trace.channel)  # csv writes None as nothing, and floats exactly
        times_s = (trace.times_s - start_s).tolist()
        writer.writerows(
            (time_s, *facts, value)
            for time_s, value in zip(times_s, trace.values.tolist(), strict=True)
        )
    write_atomically(path, text.getvalue())


def read_traces(path: Path) -> list[Trace]:
    """Reads the traces of one node.

    Raises:
        DataError: The file is missing, is not a file of power readings, or covers several nodes.
    """
    try:
        text = read_regular_bytes(path, MAX_FILE_BYTES).decode()
        reader = csv.DictReader(io.StringIO(text, newline=""))
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise DataError(
                f"is not a file of power readings: the columns must be {','.join(COLUMNS)}", path
            )
        rows = [(line, row) for line, row in enumerate(reader, start=2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"cannot be read: {reason}", path) from error
    if len({row["node"] for _, row in rows}) > 1:
        raise DataError("has readings of several nodes: split it into one file per node", path)
    samples: dict[Channel, tuple[list[float], list[float]]] = {}
    for line, row in rows:
        try:
            channel = _channel(row)
            time_s, value = float(row["time_s"]), float(row["value"])
            if not (abs(time_s) <= MAX_NUMBER and abs(value) <= MAX_NUMBER):
                raise ValueError("a number is not finite, or not possible")
        except (TypeError, ValueError) as error:
            raise DataError(str(error), path, line) from error
        times_s, values = samples.setdefault(channel, ([], []))
        if times_s and time_s <= times_s[-1]:
            raise DataError(f"{channel.device}: the times are not ascending", path, line)
        times_s.append(time_s)
        values.append(value)
    if not samples:
        raise DataError("has no readings", path)
    traces = []
    for channel, (times_s, values) in samples.items():
        interval_s = float(np.median(np.diff(times_s))) if len(times_s) > 1 else 0.0
        traces.append(Trace(channel, np.array(times_s), np.array(values), interval_s))
    return traces


def _channel(row: dict[str, str]) -> Channel:
    for name, known in (("domain", get_args(PowerDomain)), ("reading", get_args(PowerReading))):
        if row[name] not in known:
            raise ValueError(f"{name} {row[name]!r} is not one of {', '.join(known)}")
    resolution_s = float(row["resolution_s"]) if row["resolution_s"] else None
    if resolution_s is not None and not 0 <= resolution_s <= MAX_NUMBER:
        raise ValueError(f"resolution_s {row['resolution_s']} is not possible")
    names: Any = {name: printable(row[name]) for name in OF_CHANNEL[:-1]}
    return Channel(**names, resolution_s=resolution_s)
