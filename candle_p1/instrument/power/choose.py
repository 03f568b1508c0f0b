"""Sources of power readings by name, as given with ``--power``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from candle_p1.errors import DataError, ParameterError, did_you_mean
from candle_p1.files import expand_user
from candle_p1.instrument.power.counters import CraySource, RaplSource
from candle_p1.instrument.power.gpus import AmdSource, JobGpus, NvmlSource
from candle_p1.instrument.power.sampler import PowerSource, SensorError
from candle_p1.records.power_trace import REPLAYED, Channel, read_traces

AUTO, NONE, REPLAY = "auto", "none", "replay"
SENSORS: dict[str, Callable[[JobGpus], PowerSource]] = {
    "nvml": NvmlSource,
    "rapl": lambda job: RaplSource(),
    "cray": lambda job: CraySource(),
    "amd": AmdSource,
}


class ReplaySource(PowerSource):
    """Replays a recording, a file written by an earlier run, at its original speed.

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


@dataclass(frozen=True)
class OpenedSources:
    """The sources of a node that are available, and the names of those that are not, with why."""

    sources: list[PowerSource]
    absent: dict[str, str] = field(default_factory=dict)


def check_names(names: str) -> list[str]:
    """Returns the names in a value of ``--power``, or raises ParameterError.

    It is "auto" for all sensors that are available, "none", or a comma-separated list of sensors
    and of recordings, "replay:FILE".
    """
    found = [name.strip() for name in names.split(",")]
    for name in found:
        if name.startswith(f"{REPLAY}:") and name != f"{REPLAY}:":
            continue
        if name not in (*SENSORS, AUTO, NONE):
            known = (AUTO, NONE, *SENSORS, f"{REPLAY}:FILE")
            raise ParameterError(
                f"power: {name!r} is not one of {', '.join(known)}{did_you_mean(name, known)}"
            )
        if name in (AUTO, NONE) and len(found) > 1:
            raise ParameterError(f"power: {name!r} cannot be combined with other sources")
    if len(set(found)) < len(found):
        raise ParameterError(f"power: {names!r} names a source twice")
    return found


def open_sources(names: str, job: JobGpus) -> OpenedSources:
    """Opens the sources of this node, named as for `check_names`.

    Raises ParameterError if a name is wrong, or a source requested by name is not available.
    """
    requested = check_names(names)
    if requested == [NONE]:
        return OpenedSources([], {NONE: "--power none was given"})
    opened = OpenedSources([])
    for name in SENSORS if requested == [AUTO] else requested:
        kind, _, file = name.partition(":")
        try:
            source = ReplaySource(expand_user(file)) if kind == REPLAY else SENSORS[name](job)
        except SensorError as error:
            if requested != [AUTO]:
                for source in opened.sources:
                    source.stop()
                raise ParameterError(f"power {kind}: {error}") from error
            opened.absent[name] = str(error)
        else:
            opened.sources.append(source)
    return opened
