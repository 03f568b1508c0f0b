"""The source of a run whose power is not to be measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.instrument.power.source import PowerSource, SensorError

if TYPE_CHECKING:
    from candle_p1.records.power_trace import Channel


class NullSource(PowerSource):
    """Has no channels."""

    def read(self, channel: Channel) -> float:
        """Reads nothing."""
        raise SensorError("there is no sensor")
