"""Energy counters, which wrap around."""

from __future__ import annotations

from candle_p1.instrument.power.source import SensorError
from candle_p1.records.power_trace import Channel


class Counter:
    """Converts the values of an energy counter into J, which only grow.

    Values are added as integers, so that nothing is lost when a counter wraps around.

    Args:
        channel: The counter.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._num_wraps = 0
        self._last: tuple[float, float] | None = None

    def joules(self, time_s: float, count: float) -> float:
        """Returns the energy that corresponds to a value of the counter.

        A value below the last one means that the counter has wrapped around, or, if that would take
        more power than is possible, that it was reset.

        Args:
            time_s: When it was read; after the previous reading.
            count: The value.

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
