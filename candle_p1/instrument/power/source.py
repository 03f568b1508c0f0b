"""What a source of power readings is, and how the kernel's small files are read."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from candle_p1.records.power_trace import Channel

MAX_BYTES = 256


class SensorError(Exception):
    """A sensor cannot be read; the message says why, and what to do about it."""


class PowerSource(ABC):
    """Sensors that are read together, opened by the constructor.

    Raises:
        SensorError: There is nothing to read.
    """

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

    Raises:
        SensorError: The file cannot be read; the cause is the OSError.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            return os.read(descriptor, MAX_BYTES).decode().strip()
        finally:
            os.close(descriptor)
    except (OSError, UnicodeDecodeError) as error:
        raise SensorError(f"{file}: {getattr(error, 'strerror', error)}") from error
