"""What a source of power readings is: its channels, and how they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Domain = Literal["node", "cpu", "memory", "gpu"]
Reading = Literal["energy", "power"]
REPLAYED = "replay:"
"""Before the name of a source whose readings are replayed."""


class SensorError(Exception):
    """A sensor that cannot be read: why, and what would mend it."""


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
