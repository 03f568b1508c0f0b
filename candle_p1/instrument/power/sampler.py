"""The thread that samples the power of a node during a run."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np
from typing_extensions import Self

from candle_p1.instrument.power.source import PowerSource, SensorError
from candle_p1.records.power_trace import Channel, Trace

MAX_FAILURES = 3
"""After this many failed readings in a row, a sensor is no longer read."""
SNAPSHOT_S = 1.0
"""How long a sensor may take to answer while the readings so far are asked for."""
END_S = 5.0
"""How long a sensor may take to answer at the end of a run."""


class Sampler:
    """Samples all channels of some sources at a steady rate, in a separate thread.

    The first sample is taken by `start` and the last by `stop`. Errors of sensors are not raised: a
    sensor that fails ends its trace, which says why.

    Args:
        sources: What to read; nobody else may read them at the same time.
        hz: Samples per second.
        clock: Returns seconds; the clock that also times the phases of the run.

    Attributes:
        hz: The rate.
        start_s: When the first sample was taken, by the clock.
        stop_s: When the last sample was taken.
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
        self._records = [
            (source, [_ChannelReadings(channel, self.start_s) for channel in source.channels])
            for source in self._sources
        ]
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_early = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def notes(self) -> list[str]:
        """What to know when reading the energies."""
        if not self._num_early:
            return []
        return [f"{self._num_early} readings were dropped because the clock had gone backwards"]

    def start(self) -> None:
        """Takes the first sample and starts the thread."""
        for source, records in self._records:
            try:
                source.start()
            except Exception as error:
                for record in records:
                    record.end(f"it cannot be started: {error}")
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
                for _, records in self._records:
                    for record in records:
                        record.end(f"a sensor did not answer within {END_S:g} s")
                return
        self.sample()
        self.stop_s = self._clock()
        for source in self._sources:
            try:
                source.stop()
            except Exception:  # nothing depends on it any more
                continue

    def sample(self) -> None:
        """Takes a sample of every channel."""
        with self._lock:
            for source, records in self._records:
                values = source.sample()
                for record in records:
                    before_s = self._clock()
                    value = next(values)
                    # Some drivers take milliseconds; the value is from some time in between.
                    time_s = (before_s + self._clock()) / 2
                    self._num_early += not record.add(time_s, value)

    def traces(self) -> list[Trace]:
        """Returns the traces of all channels, empty ones for those that could not be opened.

        To be called after `stop`, or by `traces_so_far`.
        """
        interval_s = 1 / self.hz
        nothing = np.empty(0)
        return [
            trace
            for source, records in self._records
            for trace in (
                *(record.trace(interval_s) for record in records),
                *(
                    Trace(channel, nothing, nothing, interval_s, reason)
                    for channel, reason in source.absent.items()
                ),
            )
        ]

    def traces_so_far(self) -> list[Trace] | None:
        """Returns what `traces` does while the thread samples; None if a sensor does not answer."""
        if not self._lock.acquire(timeout=SNAPSHOT_S):
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


class _ChannelReadings:
    def __init__(self, channel: Channel, start_s: float) -> None:
        self._channel, self._start_s = channel, start_s
        self._counter = Counter(channel) if channel.reading == "energy" else None
        self._times_s, self._values = array("d"), array("d")
        self._num_failures = 0
        self._failure: str | None = None
        self._ended = False

    def add(self, time_s: float, value: float | SensorError) -> bool:
        """Adds a reading; returns False if it is not later than the previous one."""
        if self._ended:
            return True
        if self._times_s and time_s <= self._times_s[-1]:
            return False
        if not isinstance(value, SensorError) and not 0 <= value < math.inf:
            value = SensorError(f"it reads {value}")
        if isinstance(value, SensorError):
            self._fail(time_s, str(value))
            return True
        try:
            amount = (
                self._counter.joules(time_s, value) if self._counter else value * self._channel.unit
            )
        except SensorError as error:
            self._fail(time_s, str(error))
            self._ended = True
            return True
        self._num_failures, self._failure = 0, None
        self._times_s.append(time_s)
        self._values.append(amount)
        return True

    def end(self, reason: str) -> None:
        """Accepts no further readings."""
        self._failure, self._ended = reason, True

    def trace(self, interval_s: float) -> Trace:
        """Returns the readings as a trace."""
        times_s, values = np.array(self._times_s), np.array(self._values)
        return Trace(self._channel, times_s, values, interval_s, self._failure)

    def _fail(self, time_s: float, reason: str) -> None:
        if not self._num_failures:
            self._failure = f"from {time_s - self._start_s:.3f} s on: {reason}"
        self._num_failures += 1
        self._ended = self._num_failures >= MAX_FAILURES


class Counter:
    """Converts the values of an energy counter into J, which only grow.

    Values are added as integers, so that nothing is lost when a counter wraps around.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._num_wraps = 0
        self._last: tuple[float, float] | None = None

    def joules(self, time_s: float, count: float) -> float:
        """Returns the energy that corresponds to a value of the counter, read after all others.

        A value below the last one means that the counter has wrapped around, or, if that would take
        more power than is possible, that it was reset.

        Raises:
            SensorError: The counter was reset, has jumped, or was not read for so long that it may
                have wrapped around more than once. Later values are then useless.
        """
        channel = self._channel
        if self._last is not None:
            last_s, last = self._last
            # One update may add everything that has accumulated since the previous one.
            possible = channel.limit_w * (time_s - last_s + 2 * (channel.resolution_s or 0))
            if channel.modulus is not None and possible >= channel.modulus * channel.unit:
                raise SensorError(
                    f"the counter was not read for {time_s - last_s:.3g} s, in which it may have"
                    " wrapped around more than once: raise --power_hz"
                )
            grown = count - last
            if grown < 0 and channel.modulus is not None:
                grown += channel.modulus
                self._num_wraps += 1
            if grown < 0 or grown * channel.unit > possible:
                raise SensorError(
                    f"the counter went from {last * channel.unit:.6g} J to"
                    f" {count * channel.unit:.6g} J: it was reset, maybe with its device or driver"
                )
        self._last = time_s, count
        return (self._num_wraps * (channel.modulus or 0) + count) * channel.unit
