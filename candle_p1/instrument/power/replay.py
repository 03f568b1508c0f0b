"""Power readings replayed from a file written by an earlier run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from candle_p1.errors import DataError
from candle_p1.instrument.power.source import PowerSource, SensorError
from candle_p1.records.power_file import read_traces
from candle_p1.records.power_trace import REPLAYED, Channel


class ReplaySource(PowerSource):
    """Replays a recording at its original speed.

    Readings are interpolated linearly between recorded ones, and fail after the recording's end.

    Raises:
        SensorError: The file does not exist or is not a recording.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        try:
            traces = read_traces(file)
        except DataError as error:
            raise SensorError(str(error)) from error
        self._traces = {
            replace(
                trace.channel,
                source=REPLAYED + trace.channel.sensor,
                label=f"{trace.channel.label} (replayed)",
            ): trace
            for trace in traces
        }
        self.channels = list(self._traces)
        self._first_s = float(min(trace.times_s[0] for trace in traces))

    def start(self) -> None:
        """Starts at the beginning of the recording."""
        self._start_s = self._clock()

    def read(self, channel: Channel) -> float:
        """Returns J or W."""
        trace = self._traces[channel]
        time_s = self._clock() - self._start_s + self._first_s
        if time_s > trace.times_s[-1]:
            raise SensorError(f"the recording ends at {trace.times_s[-1]:.3f} s")
        return float(np.interp(time_s, trace.times_s, trace.values))
