"""What a source of power readings is, and the thread that samples those of a node during a run."""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from candle_p1.records.power_trace import Channel, Trace

MAX_BYTES = 256


class SensorError(Exception):
    """A sensor cannot be read; the message says why, and what to do about it."""


class PowerSource(ABC):
    """Sensors that are read together, opened by the constructor; SensorError if there are none."""

    name: str  # in ``--power`` and in records
    channels: Sequence[Channel] = ()  # what `sample` reads, in this order
    absent: Mapping[Channel, str] = {}  # devices of this job that cannot be read, and why

    def start(self) -> None:
        """Called once, before the first sample."""
        return

    @abstractmethod
    def read(self, channel: Channel) -> float:
        """Returns the value of a channel, in its unit; raises any exception if that fails."""

    def sample(self) -> Iterator[float | SensorError]:
        """Yields the value of one channel after the other, or an error, reading it on demand."""
        for channel in self.channels:
            try:
                yield self.read(channel)
            except SensorError as error:
                yield error
            except Exception as error:  # a sensor must never end a run
                yield SensorError(f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        """Called once, after the last sample."""
        return


def read_line(file: Path | str) -> str:
    """Returns the first line or lines of a file, ten times as fast as Path.read_text.

    Raises SensorError, caused by the OSError, if it cannot be read.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            return os.read(descriptor, MAX_BYTES).decode().strip()
        finally:
            os.close(descriptor)
    except (OSError, UnicodeDecodeError) as error:
        raise SensorError(f"{file}: {getattr(error, 'strerror', error)}") from error


END_S = 5.0
"""How long a sensor may take to answer at the end of a run."""


class Sampler:
    """Samples all channels of some sources at a steady rate, in a separate thread.

    The first sample is taken by `start` and the last by `stop`, at `start_s` and `stop_s`. Errors
    of sensors are not raised: a sensor that fails ends its trace, which says why.

    Args:
        sources: What to read; nobody else may read them at the same time.
        hz: Samples per second.
        clock: Returns seconds; the clock that also times the phases of the run.
    """

    def __init__(
        self,
        sources: Sequence[PowerSource],
        hz: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.hz = hz
        self.start_s = self.stop_s = clock()
        self._sources, self._clock = list(sources), clock
        self._readings = [
            [_Readings(channel, self.start_s) for channel in source.channels] for source in sources
        ]
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Takes the first sample and starts the thread."""
        for source, readings in zip(self._sources, self._readings, strict=True):
            try:
                source.start()
            except Exception as error:
                _end(readings, f"it cannot be started: {error}")
        self.start_s = self._clock()
        self.sample()
        # A daemon thread does not keep the process alive after its run has failed.
        self._thread = threading.Thread(target=self._run, name="power sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and takes the last sample; does nothing when called again."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread is not None:
            self._thread.join(END_S)
            if self._thread.is_alive():  # and still holds the lock
                self.stop_s = self._clock()
                for readings in self._readings:
                    _end(readings, f"a sensor did not answer within {END_S:g} s")
                return
        self.sample()
        self.stop_s = self._clock()
        for source in self._sources:
            with suppress(Exception):  # nothing depends on it any more
                source.stop()

    def sample(self) -> None:
        """Takes a sample of every channel."""
        with self._lock:
            for source, readings in zip(self._sources, self._readings, strict=True):
                values = source.sample()
                for each in readings:
                    before_s = self._clock()
                    value = next(values)
                    # Some drivers take milliseconds; the value is from some time in between.
                    each.add((before_s + self._clock()) / 2, value)

    def traces(self) -> list[Trace]:
        """Returns the traces of all channels, empty ones for those that could not be opened.

        To be called after `stop`, or by `traces_so_far`.
        """
        interval_s, nothing = 1 / self.hz, np.empty(0)
        found = []
        for source, readings in zip(self._sources, self._readings, strict=True):
            found += [each.trace(interval_s) for each in readings]
            for channel, reason in source.absent.items():
                found.append(Trace(channel, nothing, nothing, interval_s, reason))
        return found

    def traces_so_far(self) -> list[Trace] | None:
        """Returns what `traces` does while the thread samples; None if a sensor does not answer."""
        if not self._lock.acquire(timeout=1.0):
            return None
        try:
            return self.traces()
        finally:
            self._lock.release()

    def _run(self) -> None:
        interval_s = 1 / self.hz
        tick = 1
        while True:
            delay_s = self.start_s + tick * interval_s - self._clock()
            if self._ending.wait(min(max(delay_s, 0.0), interval_s)):
                return
            self.sample()
            # Missed ticks are skipped: samples in quick succession would add no information.
            tick = max(tick, math.floor((self._clock() - self.start_s) / interval_s)) + 1


class _Readings:
    """The readings of one channel; `ended` says why there are no further ones."""

    ended: str | None = None

    def __init__(self, channel: Channel, start_s: float) -> None:
        self._channel, self._start_s = channel, start_s
        self._times_s, self._values = array("d"), array("d")
        self._num_failures, self._failure = 0, ""

    def add(self, time_s: float, value: float | SensorError) -> None:
        """Adds a reading, which is later than the previous one."""
        if self.ended is not None:
            return
        if not isinstance(value, SensorError) and not 0 <= value < math.inf:
            value = SensorError(f"it reads {value}")
        if isinstance(value, SensorError):
            self._failure = self._failure or self._since(time_s, value)
            self._num_failures += 1
            if self._num_failures == 3:  # in a row
                self.ended = self._failure
            return
        self._num_failures, self._failure = 0, ""
        self._times_s.append(time_s)
        self._values.append(value)

    def trace(self, interval_s: float) -> Trace:
        """Returns the readings as a trace, up to the first that makes later ones useless."""
        times_s, values = np.array(self._times_s), np.array(self._values)
        ended = self.ended or self._failure or None
        if self._channel.reading == "power":
            values = values * self._channel.unit
        else:
            values, error = joules(self._channel, times_s, values)
            if error:
                ended = self._since(times_s[len(values)], error)
        return Trace(self._channel, times_s[: len(values)], values, interval_s, ended)

    def _since(self, time_s: float, error: object) -> str:
        return f"from {time_s - self._start_s:.3f} s on: {error}"


def _end(readings: Sequence[_Readings], reason: str) -> None:
    for each in readings:
        each.ended = reason


def joules(
    channel: Channel, times_s: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[NDArray[np.float64], str | None]:
    """Returns the energies that an energy counter has shown, in J, which only grow.

    A value below the last one means that the counter has wrapped around, or, if that would take
    more power than is possible, that it was reset. Counts are whole numbers below 2^53, so nothing
    is lost when a modulus is added to them.

    Returns:
        The energies; and, if a value shows that the counter was reset, has jumped, or was not read
        for so long that it may have wrapped around more than once, why they end before it.
    """
    waited_s, modulus = np.diff(times_s), channel.modulus
    # One update may add everything that has accumulated since the previous one.
    possible_j = channel.limit_w * (waited_s + 2 * (channel.resolution_s or 0))
    is_late = (possible_j >= (modulus or 0) * channel.unit) & (modulus is not None)
    num_wraps = np.cumsum(np.diff(counts, prepend=counts[:1]) < 0)
    energies_j = (counts + num_wraps * (modulus or 0)) * channel.unit
    grown_j = np.diff(energies_j)
    bad = np.flatnonzero(is_late | (grown_j < 0) | (grown_j > possible_j))
    if not len(bad):
        return energies_j, None
    k = bad[0]
    before_j, after_j = counts[k : k + 2] * channel.unit
    error = f"the counter went from {before_j:.6g} J to {after_j:.6g} J: it was reset, maybe with"
    error += " its device or driver"
    if is_late[k]:
        error = f"the counter was not read for {waited_s[k]:.3g} s, in which it may have wrapped"
        error += " around more than once: raise --power_hz"
    return energies_j[: k + 1], error
