"""Sources of power readings by name, as given with ``--power``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.files import expand_user
from candle_p1.instrument.power.amd import AmdSource
from candle_p1.instrument.power.cray import CraySource
from candle_p1.instrument.power.gpus import JobGpus
from candle_p1.instrument.power.nvml import NvmlSource
from candle_p1.instrument.power.rapl import RaplSource
from candle_p1.instrument.power.replay import ReplaySource
from candle_p1.instrument.power.source import PowerSource, SensorError

AUTO, NONE, REPLAY = "auto", "none", "replay"
SENSORS: dict[str, Callable[[JobGpus], PowerSource]] = {
    "nvml": NvmlSource,
    "rapl": lambda job: RaplSource(),
    "cray": lambda job: CraySource(),
    "amd": AmdSource,
}


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

    Raises:
        ParameterError: A name is wrong, or a source requested by name is not available.
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
