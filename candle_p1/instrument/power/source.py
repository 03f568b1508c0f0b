"""What a source of power readings is: its channels, and how they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from candle_p1.records.power_trace import Channel


class SensorError(Exception):
    """A sensor that cannot be read: why, and what would mend it."""


class PowerSource(ABC):
    """Sensors that are read together. Making one opens them.

    What they read over time is kept by a Sampler, as a Trace each, which gives the energy between
    two times.

    Attributes:
        channels: What `sample` reads, in its order.
        absent: Devices of this job that are there and cannot be read, and why.

    Raises:
        SensorError: There is nothing to read: why, and what would mend it.
    """

    channels: Sequence[Channel] = ()
    absent: Mapping[Channel, str] = {}

    def start(self) -> None:
        """Is called once, before the first sample."""
        return

    @abstractmethod
    def read(self, channel: Channel) -> float:
        """Returns what a channel reads, in its unit.

        Raises:
            SensorError: It cannot be read.
        """

    def sample(self) -> Iterator[float | SensorError]:
        """Reads one channel after the other, when it is asked for; yields values, or why not."""
        for channel in self.channels:
            try:
                yield self.read(channel)
            except SensorError as error:
                yield error
            except Exception as error:  # a sensor never ends a run
                yield SensorError(f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        """Is called once, after the last sample."""
        return
